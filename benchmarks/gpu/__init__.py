"""The first hour with a GPU: section by section, each measured once and kept in a file, so that calls of a few minutes
go on from each other."""
