"""The public files of heads: names, shapes and configs of every dialect that is read or written."""
