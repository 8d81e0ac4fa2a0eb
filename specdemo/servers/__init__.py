"""Lanes on servers: which may be asked, how, what is believed of their answers, and how they are started."""
