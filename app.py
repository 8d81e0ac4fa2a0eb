"""The page's entry point: `python app.py`, also on a Hugging Face Space; `specdemo ui` is the same."""

import sys

from specdemo.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["ui", *sys.argv[1:]], "error"))
