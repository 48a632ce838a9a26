"""Gates, verdict, planning cycle and recommendation."""
