"""Tasks that a rig runs for a fleet: started as the controller starts them, and never ended by an error unseen."""

import asyncio


class Spawned:
    """The tasks of one rig."""

    def __init__(self):
        self.tasks = []

    def spawn(self, work, name):
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def end(self):
        for task in self.tasks:
            task.cancel()
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        assert [error for error in ended if isinstance(error, Exception)] == []
