//! In which order gateways are told all, and what they are taken to know.

use std::sync::Mutex;

use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::session::image::Image;

use super::*;

const NAMES: [&str; 3] = ["a", "b", "c"];

/// One worker with a table of some slices; whom it was asked for, and by which view that one was told all.
#[derive(Debug)]
struct Asked {
    outlet: Outlet,
    questions: Mutex<Vec<(usize, u64)>>,
}

impl Workers for Asked {
    fn count(&self) -> usize {
        1
    }

    fn outlet(&self, _: usize) -> &Outlet {
        &self.outlet
    }

    fn send(&self, _: usize, command: Command, _: std::time::Instant) -> bool {
        let Command::Copies { mut chunk, reply } = command else { panic!("nothing else is asked: {command:?}") };
        self.questions.lock().unwrap().push((chunk.to.0.into(), chunk.told_by));
        chunk.cursor = chunk.cursor.map(|cursor| cursor + 1).filter(|cursor| *cursor < 3);
        reply.send(chunk).is_ok()
    }

    fn replication_epoch(&self) -> u64 {
        7
    }

    fn gateway(&self, name: &str) -> Option<GatewayId> {
        NAMES.iter().position(|known| *known == name).map(|at| GatewayId(at as u8))
    }

    fn place(&self, _: &Image) -> usize {
        0
    }
}

fn pump() -> (Pump, Arc<Asked>) {
    let bell = Arc::new(Bell::default());
    let workers = Arc::new(Asked { outlet: Outlet::new(bell.clone()), questions: Mutex::default() });
    (Pump::new(workers.clone(), bell, Board::new()), workers)
}

fn link(pump: &mut Pump, id: u64, peer: &str) -> (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    link_to(pump, id, peer, 1)
}

/// To this process of another gateway.
fn link_to(
    pump: &mut Pump,
    id: u64,
    peer: &str,
    incarnation: u64,
) -> (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    let (lane, frames) = mpsc::channel(16);
    let (urgent, requests) = mpsc::channel(16);
    let link = Outlink { id, incarnation, lane, urgent, stop: mpsc::channel(1).0 };
    pump.order(Order::Up { peer: peer.into(), link });
    (frames, requests)
}

/// Lets it ask and hear until there is nothing more to ask; whom it has asked for.
async fn rounds(pump: &mut Pump, workers: &Asked) -> Vec<(usize, u64)> {
    pump.ask();
    while let Some(answer) = pump.answers.join_next().await {
        pump.answer(answer.unwrap());
        pump.ask();
    }
    std::mem::take(&mut *workers.questions.lock().unwrap())
}

fn keep(pump: &mut Pump, names: &[&str], view: u64) {
    pump.order(Order::Keep(names.iter().map(|name| (*name).into()).collect(), view));
}

#[tokio::test]
async fn who_is_told_all_holds_up_no_other() {
    let (mut pump, workers) = pump();
    keep(&mut pump, &NAMES, 7);
    let _links = NAMES.map(|name| link(&mut pump, 1, name));
    let asked = rounds(&mut pump, &workers).await;
    assert_eq!(asked.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    // Also where one of them wants everything again all the time.
    pump.order(Order::Resync("b".into()));
    pump.ask();
    for _ in 0..4 {
        pump.order(Order::Resync("a".into()));
        let answer = pump.answers.join_next().await.unwrap();
        pump.answer(answer.unwrap());
        pump.ask();
    }
    let answer = pump.answers.join_next().await.unwrap();
    pump.answer(answer.unwrap());
    let asked: Vec<usize> = std::mem::take(&mut *workers.questions.lock().unwrap()).iter().map(|(to, _)| *to).collect();
    assert_eq!(asked, [1, 0, 1, 0, 1]);
}

#[tokio::test]
async fn what_a_former_process_has_left_is_nothing_that_others_lack() {
    let (mut pump, workers) = pump();
    keep(&mut pump, &[], 0);
    keep(&mut pump, &["a", "b"], 7);
    let _a = link(&mut pump, 1, "a");
    assert_eq!(rounds(&mut pump, &workers).await, [(0, 7); 3]);
    // Who comes later has heard nothing of this process, nor has who comes back.
    keep(&mut pump, &["b", "c"], 9);
    keep(&mut pump, &["a", "b", "c"], 10);
    let _b = link(&mut pump, 2, "b");
    assert_eq!(rounds(&mut pump, &workers).await, [(1, 7); 3]);
    let _links = [link(&mut pump, 3, "a"), link(&mut pump, 4, "c")];
    assert_eq!(rounds(&mut pump, &workers).await, [(0, 0), (2, 0), (0, 0), (2, 0), (0, 0), (2, 0)]);
}

#[tokio::test]
async fn a_new_process_of_another_gateway_was_told_nothing() {
    let (mut pump, workers) = pump();
    keep(&mut pump, &["a"], 7);
    let _first = link_to(&mut pump, 1, "a", 5);
    assert_eq!(rounds(&mut pump, &workers).await, [(0, 7); 3]);
    let _again = link_to(&mut pump, 2, "a", 5);
    assert_eq!(rounds(&mut pump, &workers).await, [(0, 7); 3], "a link that is made again");
    let _restarted = link_to(&mut pump, 3, "a", 6);
    assert_eq!(rounds(&mut pump, &workers).await, [(0, 0); 3]);
}
