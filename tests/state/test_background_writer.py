"""One save in flight, waits that are counted, failures that are forgotten, an end that is clean."""

import gc
import threading
import time
import weakref

import pytest

from coherent_ray.state.writer import BackgroundWriter


def test_jobs_run_in_one_other_thread_in_order():
    seen = []

    def job(number):
        seen.append((number, threading.get_ident()))
        return number * 2

    with BackgroundWriter() as writer:
        results = [writer.submit(lambda n=n: job(n)) for n in range(5)]
        assert [future.result(5) for future in results] == [0, 2, 4, 6, 8]
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_a_second_save_waits_for_the_first_and_the_wait_is_counted():
    release, running = threading.Event(), []

    def slow():
        running.append(1)
        release.wait(5)
        running.pop()

    with BackgroundWriter() as writer:
        born = time.monotonic()
        writer.submit(slow)
        assert writer.busy
        idle = writer.stall_seconds
        released = []

        def let_go():
            released.append(time.monotonic())
            release.set()

        begun = time.monotonic()
        threading.Timer(0.3, let_go).start()
        second = writer.submit(lambda: len(running))
        waited = time.monotonic() - begun
        assert second.result(5) == 0, "the first was over before the second began"
        assert released[0] - begun - 0.1 < writer.stall_seconds - idle <= waited
        assert idle <= begun - born, "the first save found the thread free"
        begun = time.monotonic()
        assert writer.wait() <= time.monotonic() - begun


def test_waiting_can_time_out_and_the_time_still_counts():
    release = threading.Event()
    with BackgroundWriter() as writer:
        future = writer.submit(lambda: release.wait(5))
        with pytest.raises(TimeoutError, match="still in flight"):
            writer.wait(timeout=0.05)
        assert writer.stall_seconds >= 0.05
        release.set()
        writer.wait()
        assert future.done()
        assert not writer.busy


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_is_its_own_future_s_and_nobody_else_s(error):
    def fail():
        raise error

    with BackgroundWriter() as writer:
        failed = writer.submit(fail)
        writer.wait()
        assert writer.submit(lambda: "whole").result(5) == "whole"
        assert failed.exception(5) is error


def test_a_job_cannot_be_cancelled_away():
    release = threading.Event()
    with BackgroundWriter() as writer:
        future = writer.submit(lambda: release.wait(5))
        assert not future.cancel()
        release.set()
        assert future.result(5) is True


def test_closing_finishes_the_job_in_flight_and_ends_the_thread():
    before = set(threading.enumerate())
    writer = BackgroundWriter("save-test")
    mine = next(t for t in set(threading.enumerate()) - before if t.name == "save-test")
    future = writer.submit(lambda: time.sleep(0.05) or "done")
    assert writer.close() is True
    assert future.result(0) == "done"
    assert not mine.is_alive()
    assert writer.close() is True
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(lambda: None)


def test_closing_gives_up_on_a_job_that_hangs():
    release = threading.Event()
    writer = BackgroundWriter()
    writer.submit(lambda: release.wait(5))
    assert writer.close(timeout=0.05) is False
    release.set()
    assert writer.close() is True


def test_a_finished_job_is_not_kept_alive():
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    with BackgroundWriter() as writer:
        writer.submit(lambda held=big: held is not None).result(5)
        writer.wait()
        del big
        gc.collect()
        assert gone() is None
