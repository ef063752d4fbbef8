"""Arrays in joblib's calls, and scikit-learn, which passes them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config

from fluster import LocalCluster
from fluster.cluster.refs import Ref
from fluster.integrations import joblib_batches
from fluster.integrations.joblib import FlusterBackend
from fluster.integrations.joblib_batches import SharedArrays

LARGE = 200_000  # float64s: more than a megabyte, from where on joblib shares arrays
SMALL = 20_000  # fewer than that, and more than what an actor's arguments are copied for


def about(array: Any, place: int) -> tuple[float, bool]:
    return float(array[place]), bool(array.flags.writeable)


def write(array: Any) -> Any:
    array += 1
    return array


def test_a_large_array_is_sent_once_and_freed(backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]]) -> None:
    array = np.arange(float(LARGE))
    for count in (1, 2):  # once for each call
        found = Parallel(batch_size=1)(delayed(about)(array, each) for each in range(30))
        assert found == [(float(each), False) for each in range(30)]
        assert len(puts) == count
        gc.collect()
        assert not any(ref() for ref in puts)
    assert len(backend._arrays) == 0  # noqa: SLF001 - bounded memory


def test_also_one_that_lies_in_other_objects(backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]]) -> None:
    array = np.asfortranarray(np.arange(float(LARGE)).reshape(2, -1))
    calls = [delayed(lambda found, place: found["x"][0][0, place])({"x": [array]}, place) for place in range(9)]
    assert Parallel(batch_size=1)(calls) == list(range(9))
    assert len(puts) == 1


def test_arrays_that_go_are_freed_while_calls_run(
    backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    def items() -> Iterator[Any]:
        for number in range(30):
            alive.append(sum(ref() is not None for ref in puts))
            yield delayed(about)(np.full(LARGE, float(number)), 5)

    assert [value for value, _ in Parallel(n_jobs=2, batch_size=1)(items())] == list(range(30))
    assert len(puts) == 30
    assert max(alive) < 15


def test_smaller_arrays_may_be_written_to_and_so_may_results(backend: FlusterBackend) -> None:
    array = np.zeros(SMALL)
    found = Parallel()(delayed(write)(array) for _ in range(4))
    found[0] += 1
    assert [each.sum() for each in found] == [2 * SMALL, SMALL, SMALL, SMALL]
    assert array.sum() == 0


@pytest.mark.parametrize("asked", [{"max_nbytes": None}, {"mmap_mode": None}, {"mmap_mode": "c"}], ids=str)
def test_large_arrays_may_be_written_to_when_that_is_asked_for(
    backend: FlusterBackend, puts: list[Any], asked: dict[str, Any]
) -> None:
    array = np.zeros(LARGE)
    found = Parallel(**asked)(delayed(write)(array) for _ in range(2))
    assert [each.sum() for each in found] == [LARGE, LARGE]
    assert not puts


def test_how_large_is_large_can_be_said(backend: FlusterBackend, puts: list[Any]) -> None:
    array = np.zeros(1_000)
    assert [value for value, _ in Parallel(max_nbytes="1K")(delayed(about)(array, 0) for _ in range(3))] == [0.0] * 3
    assert len(puts) == 1


def test_no_more_arrays_are_kept_than_there_is_room_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib_batches, "_KEPT_BYTES", 4 * 8 * LARGE)
    shared = SharedArrays()
    arrays = [np.zeros(LARGE) for _ in range(6)]
    refs = [shared.of(array, 1, lambda: cluster) for array in arrays]
    assert len(shared) == 4
    assert shared.of(arrays[5], 1, lambda: cluster) is refs[5]
    assert shared.of(arrays[0], 1, lambda: cluster) is not refs[0]
    assert shared.of([1], 1, lambda: cluster) is None
    assert shared.of(np.array([None] * LARGE), 1, lambda: cluster) is None
    del arrays[:]
    assert len(shared) == 0


@pytest.mark.slow  # scikit-learn takes its time to import, in each worker
def test_grid_search(backend: FlusterBackend, puts: list[Any]) -> None:
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    x, y = make_classification(4_500, 30, random_state=0)
    model = RandomForestClassifier(4, max_depth=4, random_state=0, n_jobs=2)  # a call in a call
    settings = {"max_features": [2, 6], "min_samples_leaf": [1, 5]}
    search = GridSearchCV(model, settings, cv=3).fit(x, y)
    assert len(puts) == 1  # x, in one of 12 fits; and the forest of the end was grown here
    with parallel_config(backend="sequential"):
        alone = GridSearchCV(model, settings, cv=3).fit(x, y)
    assert search.best_params_ == alone.best_params_
    assert search.cv_results_["mean_test_score"].tolist() == alone.cv_results_["mean_test_score"].tolist()
    assert (search.predict(x) == alone.predict(x)).all()
