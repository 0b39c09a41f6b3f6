"""Weights on their way: the file format, and the layers' journey from file to device."""
