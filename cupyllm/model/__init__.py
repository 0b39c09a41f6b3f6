"""The model around the ops: its parameters' names, its checkpoint, its node list, its driver."""
