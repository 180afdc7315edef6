"""pytest --paritree-engine ./libmyengine.so: a fixture with the engine in a supervised worker, for a user's own tests.

    def test_tree_verify(paritree_engine):
        paritree_engine.passes('{"kind":"op",...}')     # a case line; fails with the judgement's sentence

Loaded by every pytest run in the environment, so nothing heavy is imported before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from campaigns.testing import EngineUnderTest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("paritree", "differential verification of inference engines")
    group.addoption(
        "--paritree-engine",
        action="append",
        default=[],
        metavar="ENGINE",
        help="engine under test (repeatable): name, PATH.so or MODULE:CLASS",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Names are resolved here, so that a wrong one ends the run with a usage error instead of failing every test."""
    engines = config.getoption("--paritree-engine")
    if engines:
        from campaigns.testing import check_loadable

        for engine in engines:
            problem = check_loadable(engine)
            if problem:
                raise pytest.UsageError(f"--paritree-engine {engine}: {problem}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "paritree_engine" in metafunc.fixturenames:
        engines: list[Any] = metafunc.config.getoption("--paritree-engine")
        reason = pytest.mark.skip(reason="no engine: give --paritree-engine")
        metafunc.parametrize("paritree_engine", engines or [pytest.param("", marks=reason)], indirect=True, scope="session")


@pytest.fixture(scope="session")
def paritree_engine(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    """The engine of --paritree-engine, with `passes(case)` and `outcome(case)`."""
    from campaigns.testing import EngineUnderTest

    with EngineUnderTest(request.param) as engine:
        yield engine
