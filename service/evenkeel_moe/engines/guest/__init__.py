"""What the plugins of other engines share: settings, guards, the agreed plan, counting, and the agent's start."""
