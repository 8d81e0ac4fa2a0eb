"""One loop, its clock, the race, and the session around them."""
