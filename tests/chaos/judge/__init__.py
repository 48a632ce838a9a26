"""The outside judge of a chaos run: it decides from recorded facts alone whether anything tore.

It reads the bytes that passed the proxies, what ranks wrote about each of their steps, and the keys
of the store. It shares no code with the package: `python -m tests.structure` refuses an import of
`evenkeel_moe` here, and of every other folder of the tests. docs/testing.md lists its rules.
"""
