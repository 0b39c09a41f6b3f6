"""Mutation testing of the simulator's checker: does it notice when a kernel loses a barrier, a wait or a bound?

Every barrier, cp.async wait and commit, and every condition of every kernel is taken out, one at a time; the mutant
runs through the launchers' own cases. scan.py finds the places, traces.py records the launches and their inputs,
judge.py makes the mutants, replays the launches and says what was reported. expected.txt has the committed verdict on
each place, expected.py compares. scripts/mutate_kernels.py tries all of them, test_mutations.py a fixed sample.
"""
