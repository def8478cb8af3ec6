//! One link, from the handshake on: who is there, beats both ways, frames to where they belong. It ends with the first thing that
//! is wrong, and everything of it ends together.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::pin;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use vipgate_dataplane::time::Tick;

use super::Event;
use super::frame::{self, Broken};
use super::mesh::Shared;
use super::proto::frame::Kind;
use super::proto::{Beat, Echo, Hearsay, Hello};
use super::replicate::WINDOW;
use super::replicate::intake::Intake;
use super::replicate::pump::{Order, Outlink};
use super::status::Echoed;
use crate::members;
use crate::xds::proto;

/// Beats after which a link is down if nothing came.
const MOST_MISSED: u32 = 4;
/// A gateway that goes by an older view than we for so many beats is told ours: the policy server tells faster, if it is heard.
const BEHIND: u32 = 3;
/// Beats whose echo is waited for.
const UNECHOED: usize = 64;
/// Beats, echoes and acknowledgements that wait to be sent.
const WAITING: usize = 64;
/// The longest a farewell may take.
const FAREWELL: Duration = Duration::from_millis(100);

/// A stream that links go over.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// What the other side says of itself, and the version that counts.
#[derive(Debug)]
pub(super) struct Introduced {
    pub(super) name: String,
    pub(super) incarnation: u64,
    pub(super) version: u32,
}

/// Says who we are, and hears who is there.
pub(super) async fn introduce(stream: &mut impl Io, shared: &Shared) -> Result<Introduced, Broken> {
    let plan = &shared.plan;
    let (min, max) = plan.versions;
    let hello = Hello { min, max, name: plan.name.to_string(), incarnation: plan.incarnation };
    stream.write_all(&frame::encode(Kind::Hello(hello))).await?;
    stream.flush().await?;
    let theirs = match frame::read(stream, &mut Vec::new()).await? {
        Some(Kind::Hello(hello)) => hello,
        Some(Kind::Farewell(farewell)) => return Err(Broken::Refused(farewell.reason)),
        _ => return Err(Broken::Protocol("its first frame is no Hello")),
    };
    let version = max.min(theirs.max);
    if version < min.max(theirs.min) {
        return Err(Broken::Version { theirs: (theirs.min, theirs.max), ours: (min, max) });
    }
    Ok(Introduced { name: theirs.name, incarnation: theirs.incarnation, version })
}

/// Tells the other side why it ends, if it still listens.
pub(super) async fn leave(stream: &mut (impl AsyncWrite + Unpin), why: &Broken) {
    let bytes = frame::farewell(why);
    let said = async {
        stream.write_all(&bytes).await?;
        stream.shutdown().await
    };
    let _ = timeout(FAREWELL, said).await;
}

/// A link that has been let in.
pub(super) struct Link<S> {
    pub(super) id: u64,
    pub(super) peer: Arc<str>,
    pub(super) version: u32,
    /// The process at its other end.
    pub(super) incarnation: u64,
    pub(super) stream: S,
    pub(super) stop: (mpsc::Sender<Broken>, mpsc::Receiver<Broken>),
}

/// A beat that has no echo yet.
struct Sent {
    sequence: u64,
    tick: Tick,
    at: Instant,
}

struct Talk<'a> {
    shared: &'a Shared,
    peer: &'a Arc<str>,
    id: u64,
    lane: mpsc::Sender<Vec<u8>>,
    unechoed: Mutex<VecDeque<Sent>>,
}

impl<S: Io> Link<S> {
    /// Runs it to its end.
    pub(super) async fn run(self, shared: &Shared) -> Broken {
        let Self { id, peer, version, incarnation, stream, stop: (stop, mut stopped) } = self;
        let (read, mut write) = split(stream);
        let (lane, urgent) = mpsc::channel(WAITING);
        let (bulk, waiting) = mpsc::channel(WINDOW);
        // No more may be on their way, and one is in work.
        let (inside, frames) = mpsc::channel(WINDOW);
        let intake = Intake {
            peer: peer.clone(),
            workers: shared.plan.workers.clone(),
            rounds: shared.rounds.clone(),
            turns: &shared.turns,
            board: shared.board.clone(),
            events: shared.events.clone(),
            view: shared.view.subscribe(),
            lane: lane.clone(),
        };
        let now = (shared.plan.clock)();
        shared.board.update(&peer, |peer| {
            (peer.linked, peer.since, peer.version) = (true, Some(now), version);
            (peer.copies.in_sync_from, peer.copies.in_sync_to) = (false, false);
        });
        let link = Outlink { id, incarnation, lane: bulk, urgent: lane.clone(), stop };
        shared.order(Order::Up { peer: peer.clone(), link }).await;
        let talk = Talk { shared, peer: &peer, id, lane, unechoed: Mutex::default() };
        let why = tokio::select! {
            biased;
            Some(why) = stopped.recv() => why,
            why = talk.listen(read, inside) => why,
            why = talk.beat() => why,
            why = intake.run(frames) => why,
            why = send(&mut write, urgent, waiting) => why,
        };
        leave(&mut write, &why).await;
        shared.order(Order::Down { peer: peer.clone(), link: id }).await;
        why
    }
}

impl Talk<'_> {
    /// Takes frames apart until there are none, for too long or for ever.
    async fn listen<S: Io>(&self, mut stream: ReadHalf<S>, inside: mpsc::Sender<Kind>) -> Broken {
        let (mut buffer, mut behind) = (Vec::new(), 0);
        loop {
            let kind = match self.hear(&mut stream, &mut buffer).await {
                Ok(Some(kind)) => kind,
                Ok(None) => continue,
                Err(why) => return why,
            };
            let taken = match kind {
                Kind::Beat(beat) => self.echo(&beat).and_then(|()| self.tell_view(&beat, &mut behind)),
                Kind::Hearsay(hearsay) => self.hear_view(&hearsay).await,
                Kind::Echo(echo) => {
                    self.echoed(&echo);
                    Ok(())
                }
                Kind::Ack(ack) => {
                    let (peer, link) = (self.peer.clone(), self.id);
                    self.shared
                        .order(Order::Acknowledged { peer, link, number: ack.number, refused: ack.refused })
                        .await;
                    Ok(())
                }
                Kind::SyncRequest(_) => {
                    self.shared.order(Order::Resync(self.peer.clone())).await;
                    Ok(())
                }
                Kind::Sessions(_) | Kind::SyncBegin(_) | Kind::SyncEnd(_) | Kind::Released(_) => {
                    inside.try_send(kind).map_err(|error| match error {
                        TrySendError::Full(_) => {
                            Broken::Protocol("it sends more without an acknowledgement than it may")
                        }
                        TrySendError::Closed(_) => Broken::Stopping,
                    })
                }
                Kind::Farewell(farewell) => Err(Broken::Refused(farewell.reason)),
                Kind::Hello(_) => Err(Broken::Protocol("it introduces itself twice")),
            };
            if let Err(why) = taken {
                return why;
            }
        }
    }

    /// The next frame, if it comes in time.
    async fn hear<S: Io>(&self, stream: &mut ReadHalf<S>, buffer: &mut Vec<u8>) -> Result<Option<Kind>, Broken> {
        let (began, heartbeat) = (Instant::now(), self.shared.plan.heartbeat);
        let read = frame::read(stream, buffer);
        pin!(read);
        for beats in 2..=MOST_MISSED {
            // Reading comes first in it: after a pause of our own, what has come meanwhile counts.
            match timeout_at(began + heartbeat * beats, &mut read).await {
                Ok(read) => return read,
                Err(_) => self.shared.board.update(self.peer, |peer| peer.beats_missed += 1),
            }
        }
        Err(Broken::Silent((heartbeat * MOST_MISSED).as_millis()))
    }

    /// Answers a beat, unless our view says that its sender doesn't serve.
    fn echo(&self, beat: &Beat) -> Result<(), Broken> {
        let view = self.shared.view.borrow().clone();
        if !view.serves(self.peer) {
            return Ok(());
        }
        // Noted before it is sent: whoever looks never sees too little.
        let now = (self.shared.plan.clock)();
        self.shared.board.update(self.peer, |peer| peer.promised = Some(now));
        let echo = Echo { sequence: beat.sequence, view: view.number };
        self.lane.try_send(frame::encode(Kind::Echo(echo))).map_err(|_| Broken::Stuck)
    }

    /// Tells our view to whoever is `behind` for too many beats.
    fn tell_view(&self, beat: &Beat, behind: &mut u32) -> Result<(), Broken> {
        let view = self.shared.view.borrow().clone();
        *behind = if beat.view < view.number { *behind + 1 } else { 0 };
        if *behind < BEHIND {
            return Ok(());
        }
        *behind = 0;
        let hearsay = Hearsay { view: proto::View::from(&*view.said).encode_to_vec() };
        self.lane.try_send(frame::encode(Kind::Hearsay(hearsay))).map_err(|_| Broken::Stuck)
    }

    /// Passes on what view the other gateway goes by.
    async fn hear_view(&self, hearsay: &Hearsay) -> Result<(), Broken> {
        let view = proto::View::decode(&*hearsay.view).map_err(|error| Broken::Garbage(error.to_string()))?;
        let view = members::View::try_from(view).and_then(|view| view.leaves_room().map(|()| view));
        let view = view.map_err(|error| Broken::Garbage(error.to_string()))?;
        // Nobody listens: nobody misses it.
        let _ = self.shared.events.send(Event::Told { gateway: self.peer.clone(), view: Arc::new(view) }).await;
        Ok(())
    }

    fn echoed(&self, echo: &Echo) {
        let mut unechoed = self.unechoed.lock().unwrap_or_else(PoisonError::into_inner);
        // Those before it have none coming any more.
        while let Some(sent) = unechoed.pop_front_if(|sent| sent.sequence <= echo.sequence) {
            if sent.sequence == echo.sequence {
                self.shared.board.update(self.peer, |peer| {
                    peer.rtt = Some(sent.at.elapsed());
                    peer.echoed = Some(Echoed { sent: sent.tick, view: echo.view });
                });
            }
        }
    }

    async fn beat(&self) -> Broken {
        let mut beats = interval(self.shared.plan.heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for sequence in 1.. {
            beats.tick().await;
            let view = self.shared.view.borrow().number;
            let sent = Sent { sequence, tick: (self.shared.plan.clock)(), at: Instant::now() };
            let mut unechoed = self.unechoed.lock().unwrap_or_else(PoisonError::into_inner);
            if unechoed.len() == UNECHOED {
                unechoed.pop_front();
            }
            unechoed.push_back(sent);
            drop(unechoed);
            if self.lane.try_send(frame::encode(Kind::Beat(Beat { sequence, view }))).is_err() {
                break;
            }
        }
        Broken::Stuck
    }
}

/// Sends what waits, beats before sessions.
async fn send<S: Io>(
    stream: &mut WriteHalf<S>,
    mut urgent: mpsc::Receiver<Vec<u8>>,
    mut bulk: mpsc::Receiver<Vec<u8>>,
) -> Broken {
    loop {
        let bytes = tokio::select! {
            biased;
            Some(bytes) = urgent.recv() => bytes,
            Some(bytes) = bulk.recv() => bytes,
            else => return Broken::Stopping,
        };
        let sent = async {
            stream.write_all(&bytes).await?;
            stream.flush().await
        };
        if let Err(error) = sent.await {
            return error.into();
        }
    }
}
