"""What the README promises, and which tests guard it: one with which `make test` tries it, and a slow one.

The slow one runs in `make test-all`, or, where a launcher or scheduler is needed, in `make test-launchers`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """One of them.

    Attributes:
        words: Of the README, as they stand there.
        fast: A test of `make test`, as pytest names it, without the parameters of its cases.
        slow: Likewise one of `make test-all` or `make test-launchers`, with cases that `make test` leaves out.
    """

    words: str
    fast: str
    slow: str


PROMISES = (
    Promise(
        "when workers are killed or join, survivors keep running",
        "tests/faults/test_kill.py::test_kill_in_mid_epoch_survivors_go_on",
        "tests/chaos/test_grid.py::test_job_survives",
    ),
    Promise(
        "every sample counts once",
        "tests/faults/test_join.py::test_join_in_mid_epoch_all_go_on_together",
        "tests/faults/test_churn.py::test_churn_over_three_epochs_keeps_every_promise",
    ),
    Promise(
        "the learning rate follows the batch",
        "tests/lightning/test_compensation.py::test_workers_agree_on_the_scale_through_a_join_and_a_loss",
        "tests/keras/test_compensation.py::test_weights_over_a_trace_are_those_of_the_closed_form",
    ),
    Promise(
        "Survivors keep their process, with model, optimizer and data workers.",
        "tests/faults/test_deterministic.py::test_same_bits_with_data_workers_and_a_kill",
        "tests/faults/test_kill.py::test_kill_of_rank_0_survivors_go_on",
    ),
    Promise(
        "No update is lost, and none is applied twice, wherever in a step a worker dies.",
        "tests/faults/test_kill.py::test_result_that_one_lacks_is_handed_on",
        "tests/faults/test_kill.py::test_kill_within_a_step_survivors_go_on",
    ),
    Promise(
        "Each sample of an epoch counts in exactly one update, without padding duplicates",
        "tests/faults/test_kill.py::test_kill_in_the_last_step_of_an_epoch_makes_it_longer",
        "tests/faults/test_streams.py::test_a_loss_within_a_step_leaves_out_no_sample",
    ),
    Promise(
        "also in validation and test",
        "tests/faults/test_validation.py::test_kill_in_each_evaluation_outside_of_fit_covers_each_sample_once",
        "tests/faults/test_validation.py::test_kill_in_validation_covers_each_sample_once",
    ),
    Promise(
        "All workers have equal weights after each step.",
        "tests/faults/test_kill.py::test_kill_in_each_message_survivors_go_on",
        "tests/faults/test_kill.py::test_kill_in_each_message_survivors_go_on",
    ),
    Promise(
        "the weights are identical bit for bit, whoever joined or was lost",
        "tests/faults/test_deterministic.py::test_same_bits_when_a_worker_is_killed_within_a_step",
        "tests/faults/test_deterministic.py::test_same_bits_when_workers_join",
    ),
    Promise(
        "✓ samples: each position exactly once",
        "tests/demo/test_play.py::test_demo_loses_and_gains_a_worker_and_passes_its_audit",
        "tests/examples/test_notebook.py::test_notebook_trains_loses_a_worker_and_passes_its_audits",
    ),
    Promise(
        "elasticflow demo",
        "tests/demo/test_play.py::test_demo_loses_and_gains_a_worker_and_passes_its_audit",
        "tests/demo/test_wheel.py::test_demo_of_a_wheel_runs_in_an_empty_folder",
    ),
    Promise(
        "trainer = Trainer(strategy=ElasticFlowStrategy(), max_epochs=10)",
        "tests/pages/test_programs.py::test_programs_of_a_page_run",
        "tests/examples/test_run.py::test_own_module_trains_elastically_with_its_callbacks",
    ),
    Promise(
        "callbacks=ef_keras.callbacks())",
        "tests/keras/test_features.py::test_some_features_of_fit_give_what_plain_keras_gives",
        "tests/keras/test_features.py::test_features_of_fit_give_what_plain_keras_gives",
    ),
    Promise(
        "result = ef.train(model, forward,",
        "tests/faults/test_program.py::test_program_survives_a_kill_and_a_join_with_equal_weights",
        "tests/faults/test_program.py::test_program_survives_a_kill_and_a_join_with_equal_weights",
    ),
    Promise(
        "result = ef.launch(train, 10, workers=2)",
        "tests/launch/test_launched.py"
        "::test_launched_function_survives_a_killed_worker_and_returns_the_value_of_rank_0",
        "tests/launch/test_launched.py::test_launch_scales_and_stops_as_a_run_does",
    ),
    Promise(
        "the others continue, and a new one replaces it",
        "tests/launch/test_run.py::test_local_job_loses_gains_and_gives_back_workers",
        "tests/pages/test_commands.py::test_commands_of_a_page_do_what_it_says",
    ),
    Promise(
        "one HTML file: what has happened, when, and what it has cost",
        "tests/report/test_browser.py::test_real_job_with_a_join_and_a_kill",
        "tests/report/test_browser.py::test_six_hours_of_256_workers_fit_into_a_small_file",
    ),
    Promise(
        "`torchrun --nnodes=1:8 train.py` starts there, too.",
        "tests/launch/test_unnamed_rendezvous.py::test_torchrun_with_a_range_alone_starts_a_local_job_at_once",
        "tests/faults/test_torchrun_siblings.py::test_killed_worker_comes_back_to_its_sibling",
    ),
    Promise(
        "Start more nodes, or kill some, at any time",
        "tests/faults/test_failover.py"
        "::test_agent_of_the_coordinator_is_killed_and_its_worker_leaves_as_told_the_others_go_on",
        "tests/faults/test_failover.py"
        "::test_node_of_the_coordinator_is_killed_and_the_others_go_on_then_lose_and_admit_one",
    ),
    Promise(
        "export ELASTICFLOW_TOKEN",
        "tests/control/test_flood.py::test_crowd_without_the_token_takes_few_files_and_little_memory_and_evicts_nobody",
        "tests/launch/test_strangers.py::test_stranger_at_each_port_stops_nobody",
    ),
    Promise(
        "name several (`--rdzv-endpoint=HOST1:29400,HOST2:29400,HOST3:29400`)",
        "tests/launch/test_meeting.py::test_agents_at_a_list_found_one_job",
        "tests/faults/test_doors.py::test_agents_that_start_at_the_same_time_found_one_job",
    ),
    Promise(
        "or a place that all nodes reach",
        "tests/launch/test_meeting.py::test_agents_at_a_folder_found_one_job_and_a_latecomer_hears_of_its_end",
        "tests/faults/test_every_door.py::test_nodes_that_start_in_the_same_moment_are_one_job",
    ),
    Promise(
        "elasticflow slurm submit",
        "tests/faults/test_slurm.py::test_training_starts_with_the_nodes_that_are_free_and_grows",
        "tests/faults/test_slurm.py::test_node_that_is_killed_comes_back_and_the_job_ends_well",
    ),
    Promise(
        "elasticflow kubernetes submit",
        "tests/kubernetes/test_commands.py::test_submission_is_an_elastic_job_that_makes_sense",
        "tests/kubernetes/test_trainings.py::test_spare_takes_the_place_of_a_worker_that_is_lost",
    ),
    Promise(
        "elasticflow run --hosts=hosts.txt",
        "tests/faults/test_hosts.py::test_exception_in_the_script_fails_the_job",
        "tests/faults/test_hosts.py::test_host_that_dies_is_lost_and_comes_back",
    ),
    Promise(
        "[MPI](docs/guides/mpi.md)",
        "tests/faults/test_mpi.py::test_ranks_on_one_machine_are_one_job_and_survive_the_first_one",
        "tests/faults/test_mpi.py::test_ranks_on_several_nodes_meet_and_go_on_without_the_first_node",
    ),
    Promise(
        "`horovodrun`",
        "tests/faults/test_horovodrun.py::test_fault_tolerance_without_scaling",
        "tests/faults/test_horovodrun.py::test_hosts_added_and_removed",
    ),
    Promise(
        "the same command continues from there",
        "tests/faults/test_restart.py::test_job_that_is_started_again_ends_with_the_bits_of_an_undisturbed_one",
        "tests/launch/test_run.py::test_interrupt_leaves_with_a_checkpoint_and_the_same_command_goes_on",
    ),
    Promise(
        'checkpoint="s3://bucket/run"',
        "tests/faults/test_checkpoints.py::test_job_is_started_again_from_an_object_store_by_more_workers",
        "tests/faults/test_sharing.py::test_shares_are_joined_in_an_object_store",
    ),
)
