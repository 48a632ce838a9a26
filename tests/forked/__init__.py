"""Processes of tests that are forked from one which has loaded their libraries and kernels.

A controller with its planner, or a rank with torch, loads for about 10 s of a core before it does
anything. That was most of the work of a run of all tests. The fork server of multiprocessing loads
them once for each process of pytest.

Some tests start processes as operators do: `test_controller_start.py` and `test_demo.py`, the chaos
runs, and whatever uses `tests/integration/whole.py`.
"""
