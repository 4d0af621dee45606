"""Devices that run tile programs: what they promise is in `base`, each has a file of its own."""
