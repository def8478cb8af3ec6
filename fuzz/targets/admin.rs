//! Any request over the admin socket to a gateway whose workers are real: what only asks is answered the same twice, and changes nothing;
//! no frame is lost, and where there is no answer, the request is to blame.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod target {
    use std::sync::Arc;

    use vipgate::fuzzed;
    use vipgate::gateway::state::{GatewayState, WorkerHandle};
    use vipgate_dataplane::link::handoff::Wake;
    use vipgate_fuzz::support::*;
    use vipgate_fuzz::{CALLS, arrives, gateway};

    libfuzzer_sys::fuzz_target!(|data: &[u8]| admin(data));

    #[derive(Debug)]
    struct NoBell;

    impl Wake for NoBell {
        fn wake(&self) {}
    }

    /// Requests, each with two bytes of length before it, to a gateway with some sessions.
    fn admin(mut data: &[u8]) {
        let mut gateway = gateway(&Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
        gateway.hostile = true;
        for (protocol, pod, far) in CALLS {
            arrives(&mut gateway, 0, true, &packet(protocol, at(pod), at(far)));
        }
        let handles = gateway.workers.iter().zip(&gateway.commands).zip(&gateway.outlets).enumerate();
        let handles = handles.map(|(core, ((worker, commands), outlet))| WorkerHandle {
            core,
            counters: worker.counters().clone(),
            commands: commands.clone(),
            outlet: outlet.clone(),
            doorbell: Arc::new(NoBell),
        });
        let state = fuzzed::state(handles.collect(), gateway.builder.snapshot().policy, network());
        for _ in 0..8 {
            let Some((length, rest)) = data.split_first_chunk::<2>() else { break };
            let (message, rest) = rest.split_at(usize::from(u16::from_be_bytes(*length)).min(rest.len()));
            data = rest;
            let Some(request) = fuzzed::request(message) else { continue };
            let sessions = gateway.sessions();
            let first = ask(&mut gateway, &state, &request);
            if request.only_asks() {
                assert_eq!(ask(&mut gateway, &state, &request), first, "{request:?} is answered the same again");
                assert_eq!(gateway.sessions(), sessions, "{request:?} only asks");
            }
            gateway.check_frames();
        }
        // What a capture holds goes with its client, and policy with the gateway.
        drop(state);
        gateway.pass(40_000);
        assert_eq!(gateway.sessions(), 0, "everything expires");
        gateway.check_frames();
    }

    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    }

    /// Asks, and lets the workers turn until the answer is there.
    fn ask(gateway: &mut Gateway, state: &Arc<GatewayState>, request: &fuzzed::Request) -> Result<String, String> {
        RUNTIME.with(|runtime| {
            runtime.block_on(async {
                let answer = tokio::spawn(fuzzed::answer(state.clone(), request.clone()));
                while !answer.is_finished() {
                    gateway.turn();
                    tokio::task::yield_now().await;
                }
                answer.await.expect("handlers don't panic")
            })
        })
    }
}

#[cfg(not(fuzzing))]
fn main() {}
