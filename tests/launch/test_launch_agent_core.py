"""The agent's decisions, without sockets, processes or a clock."""

import signal

import pytest

from ridgeway.settings import Settings
from ridgeway.worker import agent_core as core


def make(**settings) -> core.AgentCore:
    identity = core.Identity(
        "head", 29001, "secret", 1, 0, False, "10.0.0.2", "launch-1", 4711, "host", {"jaxlib": "0.12.0.1"}
    )
    return core.AgentCore(identity, Settings(**settings), 60.0, 0.0)


def welcome(agent=5, **settings):
    return core.Welcomed(
        {
            "agent": agent,
            "slice": 1,
            "host": 0,
            "devices_per_host": 2,
            "platform": "cpu",
            "cluster": "c",
            "settings": {**Settings(**settings).to_dict(), "a_setting_of_the_future": 1},
        }
    )


def joined(**settings) -> core.AgentCore:
    agent = make()
    agent.handle(core.Started(), 0.0)
    agent.handle(welcome(**settings), 0.0)
    agent.handle(core.TemplateReady(1.0), 0.0)
    return agent


def kinds(effects):
    return [type(effect).__name__ for effect in effects if not isinstance(effect, core.Say)]


def test_template_and_connection_begin_together_and_either_may_be_first():
    for order in ("template", "head"):
        agent = make()
        assert kinds(agent.handle(core.Started(), 0.0)) == ["StartTemplate", "Connect"]
        events = [core.TemplateReady(1.5), welcome()]
        if order == "head":
            events.reverse()
        effects = [effect for event in events for effect in agent.handle(event, 0.1)]
        assert [e for e in effects if isinstance(e, core.Send)] == [core.Send(["template_ready", 1.5])]


def test_it_tries_to_reach_a_head_until_the_deadline():
    agent = make()
    agent.handle(core.Started(), 0.0)
    assert kinds(agent.handle(core.ConnectFailed("refused"), 59.0)) == ["Connect"]
    effects = agent.handle(core.ConnectFailed("refused"), 60.5)
    assert effects[-1] == core.Exit(core.EXIT_REFUSED)
    assert "no head answers at head:29001" in effects[0].text


@pytest.mark.parametrize(("taken", "code"), [(False, core.EXIT_REFUSED), (True, core.EXIT_PLACE_TAKEN)])
def test_a_place_that_is_taken_is_told_from_a_mistake(taken, code):
    agent = make()
    agent.handle(core.Started(), 0.0)
    assert agent.handle(core.Refused("no", taken), 0.1)[-1] == core.Exit(code)


def test_heartbeats_go_out_and_silence_ends_the_work():
    agent = joined(heartbeat_interval_seconds=1.0, heartbeat_timeout_seconds=4.0)
    agent.handle(core.MessageReceived(["start_executor", 7]), 0.0)
    agent.handle(core.Forked("executor", 7, 100), 0.0)
    beats = 0
    for step in range(1, 40):
        effects = agent.handle(core.Tick(), step * 0.1)
        beats += core.Send(["heartbeat"]) in effects
    assert beats == 4
    effects = agent.handle(core.Tick(), 4.1)
    assert kinds(effects) == ["SignalChild", "Exit"]
    assert core.SignalChild(100, signal.SIGKILL) in effects
    assert effects[-1] == core.Exit(core.EXIT_ORPHANED)


def test_a_head_whose_host_answers_is_waited_for():
    agent = joined(heartbeat_timeout_seconds=4.0, suspect_after_seconds=2.0, head_pause_seconds=20.0)
    said = []
    for step in range(1, 39):
        effects = agent.handle(core.Tick(0.5), step * 0.5)
        assert "Exit" not in kinds(effects)
        said += [effect.text for effect in effects if isinstance(effect, core.Say)]
    assert said == [
        "the head has been silent for 4.0 s, but its host answers: waiting for it up to 20 s (head_pause_seconds)"
    ]
    effects = agent.handle(core.MessageReceived(["heartbeat"]), 19.4)
    assert [effect.text for effect in effects] == ["the head is back after 19.4 s"]
    assert agent.handle(core.MessageReceived(["heartbeat"]), 19.5) == []
    # Once more, and now the network is cut; or it does not come back at all.
    for step in range(40, 50):
        assert "Exit" not in kinds(agent.handle(core.Tick(1.9), step * 0.5))
    gone = agent.handle(core.Tick(2.1), 25.0)
    assert gone[-1] == core.Exit(core.EXIT_ORPHANED) and "(heartbeat_timeout_seconds)" in gone[-2].text
    agent = joined(heartbeat_timeout_seconds=4.0, head_pause_seconds=20.0)
    for step in range(1, 40):
        assert "Exit" not in kinds(agent.handle(core.Tick(0.0), step * 0.5))
    gone = agent.handle(core.Tick(0.0), 20.0)
    assert gone[-1] == core.Exit(core.EXIT_ORPHANED) and "(head_pause_seconds)" in gone[-2].text


def test_any_message_of_the_head_counts_as_life():
    agent = joined(heartbeat_timeout_seconds=4.0)
    for step in range(1, 100):
        agent.handle(core.MessageReceived(["something new"]), step * 1.0)
        assert "Exit" not in kinds(agent.handle(core.Tick(), step * 1.0))


def test_an_executor_that_is_to_die_before_it_is_born_dies_at_birth():
    agent = joined()
    assert kinds(agent.handle(core.MessageReceived(["start_executor", 7]), 0.0)) == ["Fork"]
    assert kinds(agent.handle(core.MessageReceived(["kill_executor", 7, "why"]), 0.0)) == []
    assert core.SignalChild(100, signal.SIGKILL) in agent.handle(core.Forked("executor", 7, 100), 0.1)
    effects = agent.handle(core.ChildExited("executor", 7, -9), 0.2)
    assert core.Send(["process_exited", "executor", 7, -9]) in effects
    assert agent.children == {}


def test_an_executor_goes_on_as_another_process():
    agent = joined()
    agent.handle(core.MessageReceived(["start_executor", 7]), 0.0)
    agent.handle(core.Forked("executor", 7, 100), 0.0)
    assert kinds(agent.handle(core.Succeeded("executor", 7, 200), 0.1)) == []
    effects = agent.handle(core.MessageReceived(["deliver_signal", "executor", 9]), 0.2)
    assert [effect for effect in effects if isinstance(effect, core.SignalChild)] == [core.SignalChild(200, 9)]
    # One that is to die dies under whatever process id; one that nobody knows any more too.
    agent.handle(core.MessageReceived(["kill_executor", 7, "why"]), 0.3)
    assert core.SignalChild(300, signal.SIGKILL) in agent.handle(core.Succeeded("executor", 7, 300), 0.4)
    agent.handle(core.ChildExited("executor", 7, -9), 0.5)
    assert agent.handle(core.Succeeded("executor", 7, 400), 0.6) == [core.SignalChild(400, signal.SIGKILL)]


def test_a_fork_that_fails_is_reported_as_an_exit():
    agent = joined()
    agent.handle(core.MessageReceived(["start_compiler", 8]), 0.0)
    effects = agent.handle(core.ForkFailed("compiler", 8, "no memory"), 0.1)
    assert core.Send(["process_exited", "compiler", 8, core.FORK_FAILED_CODE]) in effects


def test_arguments_of_a_child():
    agent = joined(probe_hold_seconds=2.5)
    [fork] = agent.handle(core.MessageReceived(["start_compiler", 9]), 0.0)
    assert fork.arguments["compiler"] == 9 and fork.arguments["agent"] == 5
    assert fork.arguments["settings"]["probe_hold_seconds"] == 2.5
    assert (fork.arguments["head_host"], fork.arguments["head_port"]) == ("head", 29001)
    assert "secret" not in repr(fork)


def test_waiting_for_a_head_kills_the_work_but_not_the_template():
    agent = joined(orphan_policy="wait", orphan_timeout_seconds=10.0)
    agent.handle(core.MessageReceived(["start_executor", 7]), 0.0)
    agent.handle(core.Forked("executor", 7, 100), 0.0)
    effects = agent.handle(core.LinkLost("reset"), 1.0)
    assert kinds(effects) == ["SignalChild", "CloseLink", "Connect"]
    # The old executor's end is told to nobody, the old head's messages are obeyed by nobody.
    assert kinds(agent.handle(core.ChildExited("executor", 7, -9), 1.1)) == []
    assert kinds(agent.handle(core.MessageReceived(["start_executor", 8]), 1.1)) == []
    assert kinds(agent.handle(core.NotAuthenticated("another"), 5.0)) == ["Connect"]
    assert agent.hello()["slice"] == 1
    effects = agent.handle(welcome(agent=6), 6.0)
    assert core.Send(["template_ready", 1.0]) in effects
    assert agent.agent == 6
    # The next time nobody comes.
    agent.handle(welcome(agent=6, orphan_policy="wait", orphan_timeout_seconds=10.0), 6.0)
    agent.handle(core.LinkLost("reset"), 20.0)
    effects = agent.handle(core.ConnectFailed("refused"), 30.1)
    assert effects[-1] == core.Exit(core.EXIT_ORPHANED)


def test_a_wrong_secret_at_first_is_a_mistake():
    agent = make()
    agent.handle(core.Started(), 0.0)
    assert agent.handle(core.NotAuthenticated("has another cluster secret"), 0.1)[-1] == core.Exit(2)


def test_template_deaths_are_counted_within_a_window():
    agent = joined()
    for at in (10.0, 30.0, 50.0, 70.0):
        assert kinds(agent.handle(core.TemplateDied(-9, ""), at)) == ["StartTemplate"]
    effects = agent.handle(core.TemplateDied(1, "no jax"), 75.0)
    assert effects[-1] == core.Exit(core.EXIT_NO_TEMPLATE)
    assert "no jax" in effects[-2].text
    assert agent.handle(core.Tick(), 77.0) == []


def test_a_template_that_never_is_ready_is_killed_once():
    agent = make(executor_start_timeout_seconds=5.0)
    agent.handle(core.Started(), 0.0)
    killed = [at for at in range(20) if "KillTemplate" in kinds(agent.handle(core.Tick(), float(at)))]
    assert killed == [5]


def test_being_stopped_oneself_is_not_the_heads_silence():
    agent = joined(heartbeat_timeout_seconds=4.0)
    agent.handle(core.Tick(), 1.0)
    assert "Exit" not in kinds(agent.handle(core.Tick(), 60.0))
    assert "Exit" not in kinds(agent.handle(core.Tick(), 61.5))
    at, effects = 61.5, []
    while not effects or "Exit" not in kinds(effects):
        at += 0.5
        effects = agent.handle(core.Tick(), at)
    assert at == 64.0


def test_the_head_is_told_of_a_preemption_and_says_when_to_go():
    agent = joined(preemption_notice_seconds=20.0)
    effects = agent.handle(core.PreemptionAnnounced("SIGTERM"), 1.0)
    assert [e for e in effects if isinstance(e, core.Send)] == [core.Send(["preempted", 20.0, "SIGTERM"])]
    # Again, as some schedulers do: nothing new.
    assert kinds(agent.handle(core.PreemptionAnnounced("SIGTERM"), 2.0)) == []
    assert "Exit" not in kinds(agent.handle(core.Tick(), 3.0))
    effects = agent.handle(core.MessageReceived(["stop", "preempted; its state is saved"]), 4.0)
    assert effects[-1] == core.Exit(core.EXIT_STOPPED)


def test_it_goes_when_the_notice_is_over_whatever_the_head_says():
    agent = joined(preemption_notice_seconds=5.0, heartbeat_timeout_seconds=100.0)
    agent.handle(core.PreemptionAnnounced("SIGTERM"), 1.0)
    assert "Exit" not in kinds(agent.handle(core.Tick(), 5.9))
    assert agent.handle(core.Tick(), 6.0)[-1] == core.Exit(core.EXIT_STOPPED)


def test_it_does_not_wait_for_another_head_when_it_is_preempted():
    agent = joined(orphan_policy="wait")
    agent.handle(core.PreemptionAnnounced("SIGTERM"), 1.0)
    assert agent.handle(core.LinkLost("closed"), 2.0)[-1] == core.Exit(core.EXIT_STOPPED)


def test_without_a_head_or_a_place_there_is_nothing_to_save():
    agent = make()
    agent.handle(core.Started(), 0.0)
    assert agent.handle(core.PreemptionAnnounced("SIGTERM"), 1.0)[-1] == core.Exit(core.EXIT_STOPPED)


def test_an_interrupt_ends_it_at_once():
    effects = joined().handle(core.StopRequested("SIGINT"), 1.0)
    assert effects[-1] == core.Exit(core.EXIT_STOPPED)


def test_a_delivered_sigterm_goes_to_the_agent_alone():
    agent = joined()
    agent.handle(core.MessageReceived(["start_executor", 1]), 1.0)
    agent.handle(core.Forked("executor", 1, 77), 1.0)
    effects = agent.handle(core.MessageReceived(["deliver_signal", "worker", int(signal.SIGTERM)]), 2.0)
    assert [e for e in effects if not isinstance(e, core.Say)] == [core.SignalSelf(signal.SIGTERM)]


@pytest.mark.parametrize("message", [["assign"], ["start_executor", "x"], ["deliver_signal", "moon", 9], ["?"]])
def test_nonsense_of_the_head_is_ignored_and_said(message):
    effects = joined().handle(core.MessageReceived(message), 1.0)
    assert kinds(effects) == [] and "ignored" in effects[0].text


def test_signals_for_the_executor_and_for_all():
    agent = joined()
    for number, (role, order) in enumerate([("executor", "start_executor"), ("compiler", "start_compiler")]):
        agent.handle(core.MessageReceived([order, number]), 0.0)
        agent.handle(core.Forked(role, number, 100 + number), 0.0)
    effects = agent.handle(core.MessageReceived(["deliver_signal", "executor", 19]), 1.0)
    assert effects[1:] == [core.SignalChild(100, 19)]
    effects = agent.handle(core.MessageReceived(["deliver_signal", "worker", 19]), 1.0)
    assert effects[1:] == [
        core.SignalChild(100, 19), core.SignalChild(101, 19), core.SignalTemplate(19), core.SignalSelf(19)
    ]  # fmt: skip


def test_python_processes_are_started_with_what_the_head_says_and_end_with_all_they_started():
    agent = joined()
    [fork] = [e for e in agent.handle(obeyed("start_python", 3, {"slot": 4, "slots": 6}), 0.0) if kinds([e])]
    assert isinstance(fork, core.Fork) and fork.role == "python" and fork.number == 3
    assert {"slot": 4, "slots": 6, "place": "slice 1 host 0", "python": 3}.items() <= fork.arguments.items()
    agent.handle(core.Forked("python", 3, 100), 0.0)
    effects = agent.handle(core.ChildExited("python", 3, -11), 1.0)
    assert core.SignalChild(-100, signal.SIGKILL) in effects
    assert core.Send(["process_exited", "python", 3, -11]) in effects


def test_a_python_process_whose_session_is_over_has_a_while_to_end():
    agent = joined()
    for number, pid in ((3, 100), (4, 101)):
        agent.handle(obeyed("start_python", number, {}), 0.0)
        agent.handle(core.Forked("python", number, pid), 0.0)
    agent.handle(obeyed("end_python", 3), 1.0)
    beats = [second / 2 for second in range(2, int(2 * core.PYTHON_END_SECONDS) + 1)]
    killed = []
    for now in beats:
        agent.handle(core.MessageReceived(["heartbeat"]), now)
        killed += [e for e in agent.handle(core.Tick(), now) if isinstance(e, core.SignalChild)]
    assert killed == []
    effects = agent.handle(core.Tick(), 1.5 + core.PYTHON_END_SECONDS)
    signals = [e for e in effects if isinstance(e, core.SignalChild)]
    assert signals == [core.SignalChild(100, signal.SIGKILL), core.SignalChild(-100, signal.SIGKILL)]
    assert agent.handle(obeyed("end_python", 99), 2.0) == []


def test_a_python_process_can_be_killed_before_it_is_known():
    agent = joined()
    agent.handle(obeyed("start_python", 3, {}), 0.0)
    agent.handle(obeyed("kill_python", 3, "too slow"), 0.0)
    effects = agent.handle(core.Forked("python", 3, 100), 0.1)
    assert {core.SignalChild(100, signal.SIGKILL), core.SignalChild(-100, signal.SIGKILL)} <= set(
        e for e in effects if isinstance(e, core.SignalChild)
    )


def obeyed(*message) -> core.MessageReceived:
    return core.MessageReceived(list(message))
