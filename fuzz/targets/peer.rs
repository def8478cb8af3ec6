//! Any bytes over a link between gateways: frames and sessions come back as they were read, and workers take what is read in, and packets
//! after it.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod target {
    use vipgate::fuzzed::{self, Copies};
    use vipgate_dataplane::command::{Command, MOST_TAKEN, PurgeChunk};
    use vipgate_dataplane::copies::worker_of;
    use vipgate_fuzz::support::cluster::{Cluster, name};
    use vipgate_fuzz::support::*;
    use vipgate_fuzz::{CALLS, check_sent};

    libfuzzer_sys::fuzz_target!(|data: &[u8]| peer(data));

    /// Bytes over a link from gateway 0 to gateway 1, which takes what is read, forgets what it is told to, then stands in for the dead one.
    fn peer(data: &[u8]) {
        let told = fuzzed::peer(data);
        if told.is_empty() {
            return;
        }
        let mut cluster = Cluster::new(2, &Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
        for gateway in &mut cluster.gateways {
            gateway.counts_vary();
            gateway.hostile = true;
        }
        for copies in told {
            take(&mut cluster, copies);
            cluster.pass(10);
        }
        let held = |cluster: &Cluster| cluster.copies(1) + cluster.gateways[1].sessions();
        assert!(held(&cluster) <= 128, "no more than fit");
        cluster.kill(0);
        for (protocol, pod, far) in CALLS {
            let sent = cluster.gateways[1].workers[0].io().inject(INSIDE, &packet(protocol, at(pod), at(far)));
            assert!(sent);
            let sent = cluster.gateways[1].run();
            check_sent(&sent);
            for (_, frame) in sent.iter().filter(|(interface, _)| *interface == OUTSIDE) {
                let _ = cluster.gateways[1].workers[1].io().inject(OUTSIDE, &answer_to(frame, protocol));
                check_sent(&cluster.gateways[1].run());
            }
        }
        for gateway in &mut cluster.gateways {
            gateway.pass(40_000);
            gateway.check_frames();
        }
        assert_eq!(cluster.gateways[1].sessions(), 0, "what became live expires");
    }

    fn take(cluster: &mut Cluster, copies: Copies) {
        let gateway = &mut cluster.gateways[1];
        let Some(from) = gateway.builder.gateway(&name(0)) else { return };
        match copies {
            Copies::Take(images, round) => {
                assert!(images.len() <= MOST_TAKEN);
                let policy = gateway.builder.snapshot().policy;
                for image in images {
                    let worker = worker_of(&image, &policy, gateway.workers.len() as u8);
                    let (reply, done) = crossbeam::channel::bounded(1);
                    let command = Command::Take { images: vec![image], round, from, reply };
                    assert!(gateway.commands[usize::from(worker.0)].send(command).is_ok());
                    gateway.turn();
                    let refused = done.try_recv();
                    assert!(
                        refused.is_ok_and(|refused| [&[], &[image][..]].contains(&&*refused)),
                        "{image:?} is dealt with"
                    );
                }
            }
            Copies::Purge(round) => {
                for worker in 0..gateway.workers.len() {
                    let mut cursor = Some(0);
                    for _ in 0..64 {
                        let (reply, answer) = crossbeam::channel::bounded(1);
                        let told_by = gateway.builder.snapshot().policy.members().replication_epoch();
                        let (view, forgotten, outdated, spared) = (1, 0, false, false);
                        let chunk =
                            PurgeChunk { owner: from, round, view, told_by, cursor, forgotten, outdated, spared };
                        assert!(gateway.commands[worker].send(Command::Purge { chunk, reply }).is_ok());
                        gateway.turn();
                        cursor = answer.try_recv().ok().and_then(|chunk| chunk.cursor);
                        if cursor.is_none() {
                            break;
                        }
                    }
                    assert_eq!(cursor, None, "it comes to an end");
                }
            }
        }
    }
}

#[cfg(not(fuzzing))]
fn main() {}
