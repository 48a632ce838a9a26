"""Generated wire stubs; rebuilt by `make proto`, never edited."""
