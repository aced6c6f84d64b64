"""Processes beside this one that do what must end in time, or what nobody has read."""
