"""Swaps of versions under load, and canaries, real and simulated: what is found, and how soon."""
