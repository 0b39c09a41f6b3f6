"""`python -m cupyllm`: the same as the `cupyllm` command."""

import sys

try:
    from cupyllm.cli import main
except KeyboardInterrupt:
    print("cupyllm: error: interrupted", file=sys.stderr)
    sys.exit(130)

main()
