"""The page: controls in, lines of JSON out. No algorithm lives here."""
