"""`python -m cupyllm`: the same as the `cupyllm` command."""

from cupyllm.cli import main

main()
