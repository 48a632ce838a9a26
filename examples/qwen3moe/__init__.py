"""A Hugging Face MoE model under Evenkeel's control; see README.md."""
