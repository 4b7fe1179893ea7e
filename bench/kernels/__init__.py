"""The time of each GPU kernel beside the least that its bytes and operations take."""
