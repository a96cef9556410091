"""A script that nobody changed, as one rank: run, watched from outside, ended after its steps."""
