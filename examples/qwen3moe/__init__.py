"""A Hugging Face MoE model whose experts Evenkeel balances; see README.md."""
