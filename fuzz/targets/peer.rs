//! Fuzz target of the replication protocol: any bytes on a link between gateways. Decoded frames and session records
//! are encoded to the same bytes, and workers apply all decoded records and forward packets afterwards.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod target {
    use vipgate::fuzz;
    use vipgate::fuzz::RecordCommand;
    use vipgate_dataplane::replication::apply::worker_of;
    use vipgate_dataplane::replication::round::PurgeChunk;
    use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;
    use vipgate_dataplane::worker::command::Command;
    use vipgate_fuzz::{EGRESS_PACKETS, check_no_leak};
    use vipgate_testkit::cluster::{Cluster, name};
    use vipgate_testkit::*;

    libfuzzer_sys::fuzz_target!(|data: &[u8]| peer(data));

    /// Bytes from gateway 0 to gateway 1, which applies the decoded records and purges, then fails over for gateway 0.
    fn peer(data: &[u8]) {
        let commands = fuzz::peer(data);
        if commands.is_empty() {
            return;
        }
        let mut cluster = Cluster::new(2, &Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
        for gateway in &mut cluster.gateways {
            gateway.skip_counter_check();
            gateway.hostile = true;
        }
        for command in commands {
            execute(&mut cluster, command);
            cluster.advance(10);
        }
        let sessions = |cluster: &Cluster| cluster.standby_sessions(1) + cluster.gateways[1].sessions();
        assert!(sessions(&cluster) <= 128, "the capacity is not exceeded");
        cluster.kill(0);
        for (protocol, pod, remote) in EGRESS_PACKETS {
            let injected = cluster.gateways[1].workers[0].io().inject(INSIDE, &packet(protocol, at(pod), at(remote)));
            assert!(injected);
            let sent = cluster.gateways[1].run();
            check_no_leak(&sent);
            for (_, frame) in sent.iter().filter(|(interface, _)| *interface == OUTSIDE) {
                let _ = cluster.gateways[1].workers[1].io().inject(OUTSIDE, &reply_to(frame, protocol));
                check_no_leak(&cluster.gateways[1].run());
            }
        }
        for gateway in &mut cluster.gateways {
            gateway.advance(40_000);
            gateway.check_frames();
        }
        assert_eq!(cluster.gateways[1].sessions(), 0, "all sessions expire");
    }

    fn execute(cluster: &mut Cluster, command: RecordCommand) {
        let gateway = &mut cluster.gateways[1];
        let Some(source) = gateway.builder.gateway_id(&name(0)) else { return };
        match command {
            RecordCommand::Apply(records, round) => {
                assert!(records.len() <= MAX_RECORDS_APPLIED);
                let policy = gateway.builder.snapshot().policy;
                for record in records {
                    let worker = worker_of(&record, &policy, gateway.workers.len() as u8);
                    let (reply, response) = crossbeam::channel::bounded(1);
                    let command = Command::ApplyRecords { records: vec![record], round, source, reply };
                    assert!(gateway.commands[usize::from(worker.0)].send(command).is_ok());
                    gateway.turn();
                    let rejected = response.try_recv();
                    assert!(
                        rejected.is_ok_and(|rejected| [&[], &[record][..]].contains(&&*rejected)),
                        "{record:?} is applied or rejected"
                    );
                }
            }
            RecordCommand::Purge(round) => {
                for worker in 0..gateway.workers.len() {
                    let (policy, epoch) = {
                        let snapshot = gateway.builder.snapshot();
                        let members = snapshot.policy.members();
                        (members.policy_version().clone(), members.replication_epoch())
                    };
                    let mut chunk = PurgeChunk::first(source, (round, 1, policy), epoch);
                    for _ in 0..64 {
                        let (reply, response) = crossbeam::channel::bounded(1);
                        assert!(gateway.commands[worker].send(Command::PurgeStandby { chunk, reply }).is_ok());
                        gateway.turn();
                        chunk = response.try_recv().expect("each turn runs a command");
                        if chunk.cursor.is_none() {
                            break;
                        }
                    }
                    assert_eq!(chunk.cursor, None, "the purge completes");
                }
            }
        }
    }
}

#[cfg(not(fuzzing))]
fn main() {}
