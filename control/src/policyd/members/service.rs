//! Membership over gRPC: a task for each stream. Of beats that wait for their turn only the last one counts, so a slow store
//! makes answers late, but never a queue of them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::registrar::{Answer, Event, Members, Origin, Unanswered};
use super::roster::Refusal;
use crate::members::{Beat, View};
use crate::policyd::figures::Figures;
use crate::policyd::identity::{Peer, Refusals};
use crate::xds::proto;
use crate::xds::proto::membership_server::{Membership, MembershipServer};

/// Notices of one stream that wait for the network.
const QUEUE: usize = 4;
/// The longest beat, bytes: it may hold a whole view.
const LONGEST: usize = 512 << 10;
/// How long the first beat of a stream may take, and the next one: longer than any TTL.
const FIRST_BEAT: Duration = Duration::from_secs(10);
const NEXT_BEAT: Duration = Duration::from_secs(75);

/// The service of this authority.
pub fn server(members: Members, figures: Arc<Figures>, refusals: Arc<Refusals>) -> MembershipServer<Service> {
    let streams = Arc::default();
    MembershipServer::new(Service { members, figures, refusals, streams }).max_decoding_message_size(LONGEST)
}

/// What all streams share.
#[derive(Clone, Debug)]
pub struct Service {
    members: Members,
    figures: Arc<Figures>,
    refusals: Arc<Refusals>,
    /// Streams that there have been.
    streams: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Membership for Service {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<proto::Notice, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<proto::Beat>>) -> Result<Response<Self::JoinStream>, Status> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (events, view) = (self.members.events.clone(), self.members.view.clone());
        let peer = Peer::of(&request);
        let origin = Origin { stream: self.streams.fetch_add(1, Relaxed) + 1, address: peer.address };
        let (shared, known, told, process) = (self.clone(), None, None, None);
        let talk = Talk { shared, peer, origin, events, view, sender, known, told, process };
        tokio::spawn(talk.run(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// A stream with one gateway.
struct Talk {
    shared: Service,
    peer: Peer,
    origin: Origin,
    events: mpsc::Sender<Event>,
    view: watch::Receiver<Arc<View>>,
    sender: mpsc::Sender<Result<proto::Notice, Status>>,
    /// The view that it knew when it came, until that has counted: while the policy doesn't have it, its word changes nothing.
    known: Option<Arc<View>>,
    /// The view that it was told last; none: none yet.
    told: Option<Arc<View>>,
    /// Its name and its process, once it has said them.
    process: Option<(Arc<str>, u64)>,
}

/// A beat that was taken in and not answered yet.
struct Pending {
    sequence: u64,
    answer: oneshot::Receiver<Result<Answer, Unanswered>>,
}

impl Pending {
    async fn wait(pending: &mut Option<Self>) -> Result<Result<Answer, Unanswered>, oneshot::error::RecvError> {
        match pending {
            Some(pending) => (&mut pending.answer).await,
            None => std::future::pending().await,
        }
    }
}

impl Talk {
    async fn run(mut self, mut beats: Streaming<proto::Beat>) {
        if let Err(Some(status)) = self.follow(&mut beats).await {
            // Whoever has gone away needs no reason.
            let _ = self.sender.send(Err(status)).await;
        }
        if let Some((name, incarnation)) = self.process {
            let _ = self.events.send(Event::Left(name, incarnation, self.origin)).await;
        }
    }

    /// Takes beats and gives notices until the stream ends, for a reason or for none.
    async fn follow(&mut self, beats: &mut Streaming<proto::Beat>) -> Result<(), Option<Status>> {
        let (mut next, mut pending) = (None::<(u64, Beat)>, None::<Pending>);
        let mut due = Instant::now() + FIRST_BEAT;
        loop {
            tokio::select! {
                beat = beats.message() => {
                    let Some(message) = beat.map_err(Some)? else { return Ok(()) };
                    due = Instant::now() + NEXT_BEAT;
                    let (sequence, mut beat) = self.read(message)?;
                    // What it knows it says first, or never.
                    if let Some(view) = beat.view.take()
                        && self.told.is_none()
                    {
                        self.known = Some(view);
                    }
                    next = Some((sequence, beat));
                }
                answer = Pending::wait(&mut pending) => {
                    let sequence = pending.take().map_or(0, |pending| pending.sequence);
                    let answer = answer.map_err(|_| Some(Status::unavailable("the policy server stops")))?;
                    let answer = answer.map_err(|why| Some(self.refuse(&why)))?;
                    if !answer.is_stranger {
                        self.known = None;
                    }
                    self.tell(sequence, answer).await?;
                }
                // Before its first beat has been taken in, it may know more than we do.
                changed = self.view.changed(), if self.told.is_some() => {
                    changed.map_err(|_| Some(Status::unavailable("the policy server stops")))?;
                    let view = self.view.borrow_and_update().clone();
                    if self.told.as_ref() != Some(&view) {
                        self.tell(0, Answer { lease: None, view, rival: None, is_stranger: false }).await?;
                    }
                }
                () = sleep_until(due) => return Err(Some(Status::deadline_exceeded("no beat for too long"))),
                () = self.sender.closed() => return Ok(()),
            }
            if pending.is_none()
                && let Some((sequence, mut beat)) = next.take()
            {
                beat.view.clone_from(&self.known);
                let (sender, answer) = oneshot::channel();
                self.events.send(Event::Beat(beat, self.origin, sender)).await.map_err(|_| None)?;
                pending = Some(Pending { sequence, answer });
            }
        }
    }

    fn read(&mut self, message: proto::Beat) -> Result<(u64, Beat), Option<Status>> {
        let sequence = message.sequence;
        let beat = Beat::try_from(message).map_err(|why| Some(Status::invalid_argument(why.to_string())))?;
        if self.process.is_none()
            && let Err(status) = self.peer.may_be(&beat.gateway)
        {
            self.shared.figures.misnamed.add();
            self.shared.refusals.log(&self.peer, &beat.gateway, &status);
            return Err(Some(status));
        }
        let process = (beat.gateway.clone(), beat.incarnation);
        let own = self.process.get_or_insert_with(|| process.clone());
        if *own != process {
            let why = format!("this stream is gateway {}'s, not {}'s: open another one", own.0, beat.gateway);
            return Err(Some(Status::invalid_argument(why)));
        }
        Ok((sequence, beat))
    }

    async fn tell(&mut self, sequence: u64, answer: Answer) -> Result<(), Option<Status>> {
        let Answer { lease, view, rival, is_stranger: _ } = answer;
        let is_news = self.told.as_ref() != Some(&view);
        let notice = proto::Notice {
            sequence,
            lease_ms: lease.map_or(0, |lease| u32::try_from(lease.as_millis()).unwrap_or(u32::MAX)),
            view: is_news.then(|| (&*view).into()),
            rival: rival.map(|address| address.to_string()).unwrap_or_default(),
        };
        self.told = Some(view);
        self.sender.send(Ok(notice)).await.map_err(|_| None)
    }
}

impl Talk {
    /// What to say to a process whose beat isn't answered; logs it where that is about its name.
    fn refuse(&self, why: &Unanswered) -> Status {
        let status = status(why);
        if let (Unanswered::Refused { refusal, .. }, Some((name, _))) = (why, &self.process) {
            match refusal {
                Refusal::UsedTwice { .. } => self.shared.figures.twice.add(),
                Refusal::Forged { .. } => self.shared.figures.forged.add(),
            }
            self.shared.refusals.log(&self.peer, name, &status);
        }
        status
    }
}

fn status(why: &Unanswered) -> Status {
    match why {
        Unanswered::Refused { refusal: Refusal::UsedTwice { .. }, .. } => Status::already_exists(why.to_string()),
        Unanswered::Refused { refusal: Refusal::Forged { .. }, .. } => Status::permission_denied(why.to_string()),
        Unanswered::Store(_) | Unanswered::Late => Status::unavailable(why.to_string()),
    }
}
