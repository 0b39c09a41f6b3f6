# Shorthands only; the commands themselves are in README.md and .ci/run.
.PHONY: test ci format clean

test:
	.venv/bin/python -m pytest -n auto

ci:
	bash .ci/run

format:
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
