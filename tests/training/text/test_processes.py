"""Worker processes: results in the order of the jobs, few jobs at a time, an error where one is killed."""

import os

import pytest

from torch_thor.training import UserError
from torch_thor.training.text.processes import Job, results

JOBS = [Job(number, (number, 2), done=-1 if number % 3 == 0 else None) for number in range(20)]
FOUND = [(number, -1 if number % 3 == 0 else number**2) for number in range(20)]


def test_results_come_in_the_order_of_the_jobs():
    assert list(results(pow, JOBS, 2)) == FOUND
    assert list(results(pow, JOBS, 1)) == FOUND


def test_no_more_jobs_are_taken_than_processes_need():
    taken = []

    def jobs():
        for job in JOBS:
            taken.append(job)
            yield job

    for number, _ in enumerate(results(pow, jobs(), 2), 1):
        assert len(taken) <= number + 4
    assert len(taken) == len(JOBS)


def test_an_error_in_a_job_is_raised_here():
    with pytest.raises(TypeError):
        list(results(pow, [Job(0, ("a", 2)), *JOBS], 2))


def test_a_process_that_is_killed_is_one_clear_error():
    with pytest.raises(UserError, match=r"ended from outside .* give the same command again"):
        list(results(os._exit, [Job(0, (9,))], 2))
