//! Fuzz target of the admin API: any request to a gateway with real workers. Read-only requests are idempotent, no
//! frame is lost, and all errors are client errors.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod target {
    use std::sync::Arc;

    use vipgate::fuzz;
    use vipgate::state::{GatewayState, WorkerHandle};
    use vipgate_dataplane::io::handoff::Wake;
    use vipgate_fuzz::{EGRESS_PACKETS, gateway, inject};
    use vipgate_testkit::*;

    libfuzzer_sys::fuzz_target!(|data: &[u8]| admin(data));

    #[derive(Debug)]
    struct NoopWaker;

    impl Wake for NoopWaker {
        fn wake(&self) {}
    }

    /// Executes requests, each with a length prefix of two bytes, on a gateway with some sessions.
    fn admin(mut data: &[u8]) {
        let mut gateway = gateway(&Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
        gateway.hostile = true;
        for (protocol, pod, remote) in EGRESS_PACKETS {
            inject(&mut gateway, 0, true, &packet(protocol, at(pod), at(remote)));
        }
        let handles = gateway.workers.iter().zip(&gateway.commands).zip(&gateway.replication_senders).enumerate();
        let handles = handles.map(|(core, ((worker, commands), replication))| WorkerHandle {
            core,
            counters: worker.counters().clone(),
            commands: commands.clone(),
            replication: replication.clone(),
            doorbell: Arc::new(NoopWaker),
        });
        let state = fuzz::state(handles.collect(), gateway.builder.snapshot().policy, network());
        for _ in 0..8 {
            let Some((length, rest)) = data.split_first_chunk::<2>() else { break };
            let (message, rest) = rest.split_at(usize::from(u16::from_be_bytes(*length)).min(rest.len()));
            data = rest;
            let Some(request) = fuzz::request(message) else { continue };
            let sessions = gateway.sessions();
            let first = query(&mut gateway, &state, &request);
            if fuzz::is_read_only(&request) {
                assert_eq!(query(&mut gateway, &state, &request), first, "{request:?} is idempotent");
                assert_eq!(gateway.sessions(), sessions, "{request:?} is read-only");
            }
            gateway.check_frames();
        }
        // Ends captures and releases the policy.
        drop(state);
        gateway.advance(40_000);
        assert_eq!(gateway.sessions(), 0, "all sessions expire");
        gateway.check_frames();
    }

    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    }

    /// Executes a request, running the workers until the reply is complete.
    fn query(
        gateway: &mut Gateway,
        state: &Arc<GatewayState>,
        request: &fuzz::Request,
    ) -> Result<String, fuzz::RejectedRequest> {
        RUNTIME.with(|runtime| {
            runtime.block_on(async {
                let reply = tokio::spawn(fuzz::reply(state.clone(), request.clone()));
                while !reply.is_finished() {
                    gateway.turn();
                    tokio::task::yield_now().await;
                }
                reply.await.expect("handlers don't panic")
            })
        })
    }
}

#[cfg(not(fuzzing))]
fn main() {}
