"""Leases, takeover and the lookup of leaders."""
