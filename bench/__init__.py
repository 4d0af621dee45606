"""How fast and how true the lab is: `python -m bench`, or `make bench`.

One file per subject. Each measures on this machine and prints the figure beside the one asked
for; nothing is asserted.
"""
