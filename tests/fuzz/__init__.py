"""A mutation fuzzer for every parser of foreign bytes."""
