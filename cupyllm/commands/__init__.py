"""What the commands do, one module a command; cupyllm/cli.py holds their options."""
