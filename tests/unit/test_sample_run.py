"""The sample run: written without a model, with one of everything a run can hold; its ledger and checksums hold."""

from __future__ import annotations

from pathlib import Path

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from agentrl.journal.run_log import SqliteRunLog


def test_it_holds_one_of_everything(sample_run: Path) -> None:
    reader, forks = RunReader(sample_run), RunReader(sample_run / "forks")
    assert reader.ledger().holds
    assert {line.status for line in reader.episodes(limit=10_000)} >= {"trained", "dropped", "finished"}
    assert reader.count("attempt > 0") > 0, "an episode was begun again"
    assert reader.count("parent != null and purpose = 'evaluate'") > 0
    assert "environment_error" in reader.counts()[1]
    assert len(reader.curve()) == 16
    log = SqliteRunLog(sample_run / "journal")
    lineages = log.rows("SELECT DISTINCT lineage FROM versions WHERE policy = 'solver' ORDER BY lineage")
    assert lineages == [(0,), (1,)], "a lost trainer, and a rollback"
    assert log.rows("SELECT count(*) FROM episodes WHERE metrics LIKE '%\"parked\"%'") > [(0,)]
    log.close()
    turns = [
        entry
        for line in reader.episodes("environment ~ Solve and policies ~ solver", limit=10_000)
        for _, entry in reader.episode(line.episode).entries
        if isinstance(entry, TurnEntry)
    ]
    assert any(len(turn.tokens.spans) > 1 for turn in turns), "an update inside a turn"
    assert any(pause.why == "parked" and pause.seconds > 0 for turn in turns for pause in turn.pauses)
    assert len(forks.episodes()) == 4
    reader.close()
    forks.close()
