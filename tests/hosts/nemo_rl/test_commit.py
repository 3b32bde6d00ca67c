from __future__ import annotations

import subprocess

import pytest

from nemo_geomask.hosts.nemo_rl.installed_version import commit_of


def git(folder, *arguments):
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO_RL_COMMIT", raising=False)
    folder = tmp_path / "RL"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=one")
    return folder


def test_of_a_branch_a_detached_head_packed_refs_and_a_work_tree(checkout, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == commit
    git(checkout, "pack-refs", "--all")
    assert not (checkout / ".git" / "refs" / "heads" / "main").exists()
    assert commit_of(checkout) == commit
    git(checkout, "checkout", "--quiet", "--detach")
    assert commit_of(checkout) == commit
    # And of another work tree.
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "--quiet", "--allow-empty", "--message=two")
    assert commit_of(tmp_path / "other") == git(tmp_path / "other", "rev-parse", "HEAD") != commit_of(checkout)


def test_without_git_what_the_container_says(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_RL_COMMIT", "<unknown>")
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("NEMO_RL_COMMIT", "7ea279abf0")
    assert commit_of(tmp_path) == "7ea279abf0"
    monkeypatch.delenv("NEMO_RL_COMMIT")
    assert commit_of(tmp_path) is None
