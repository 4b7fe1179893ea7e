"""The settings of conftest.py are in force."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest


def test_mixed_dtypes_are_an_error():
    with pytest.raises(ValueError, match="dtype"):
        jnp.add(jnp.ones(3, jnp.float32), jnp.ones(3, jnp.bfloat16))


def test_broadcasting_to_a_higher_rank_is_an_error():
    with pytest.raises(ValueError, match="rank"):
        jnp.add(jnp.ones((2, 3)), jnp.ones(3))


def test_a_subprocess_is_as_strict():
    code = "import jax.numpy as jnp; jnp.ones((2, 3)) + jnp.ones(3)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert "rank_promotion" in done.stderr


def test_the_home_folder_is_not_the_users(users_home: Path):
    assert Path.home() != users_home
