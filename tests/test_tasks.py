"""Background tasks: a failure stays one task's own."""

import asyncio

from meshswarm.tasks import Tasks


async def test_a_failing_task_is_reported_and_leaves_the_others_running() -> None:
    failures: list[Exception] = []
    done: list[str] = []

    async def fail() -> None:
        raise RuntimeError("mistake")

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("work")

    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group, failures.append)
        tasks.create_task(fail())
        tasks.create_task(work())
    assert [str(failure) for failure in failures] == ["mistake"]
    assert done == ["work"]


async def test_cancelling_a_task_is_no_failure() -> None:
    failures: list[Exception] = []
    async with asyncio.TaskGroup() as group:
        task = Tasks(group, failures.append).create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
    assert failures == []
