"""The controller process."""
