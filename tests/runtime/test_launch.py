"""Steps are handed over in order, in a thread of their own; what goes wrong there is raised."""

import threading
import time

import pytest

from deepinfer_jax.runtime.launch import Launcher


def step(state):
    return state + 1, f"results of {state}"


@pytest.mark.parametrize("inline", [False, True])
def test_each_step_gets_the_state_of_the_one_before(inline):
    launcher = Launcher(inline=inline)
    launcher.state = 0
    tasks = [launcher.launch(step) for _ in range(50)]
    assert [task.result() for task in tasks] == [f"results of {n}" for n in range(50)]
    assert launcher.state == 50


def test_the_caller_goes_on_while_a_step_is_handed_over():
    launcher, go, threads = Launcher(inline=False), threading.Event(), []
    launcher.state = 0

    def slow(state):
        threads.append(threading.current_thread())
        assert go.wait(60)
        return step(state)

    task, following = launcher.launch(slow), launcher.launch(step)
    assert not task.done() and not following.done()
    go.set()
    assert task.result() == "results of 0" and launcher.state == 2
    assert threads != [threading.current_thread()]


def test_settle_waits_until_a_step_is_handed_over():
    launcher, log = Launcher(inline=False), []
    launcher.state = 0

    def slow(state):
        time.sleep(0.05)
        log.append("handed over")
        return step(state)

    launcher.launch(slow)
    launcher.settle()
    assert log == ["handed over"]


def fails(_):
    raise ValueError("no memory")


def test_what_goes_wrong_is_raised_to_whoever_needs_the_state_or_the_results():
    launcher = Launcher(inline=False)
    launcher.state = 0
    task = launcher.launch(fails)
    with pytest.raises(ValueError, match="no memory"):
        launcher.settle()
    with pytest.raises(ValueError, match="no memory"):
        task.result()
    with pytest.raises(RuntimeError, match="a step before this one was not handed over"):
        launcher.launch(step).result()
    launcher.state = 7  # as a reset does
    assert launcher.launch(step).result() == "results of 7"


def test_a_new_state_waits_for_a_step_that_is_broken_off():
    launcher, log = Launcher(inline=False), []
    launcher.state = 0

    def slow(state):
        time.sleep(0.05)
        log.append("handed over")
        return step(state)

    launcher.launch(slow)
    launcher.state = 5
    assert log == ["handed over"] and launcher.state == 5
