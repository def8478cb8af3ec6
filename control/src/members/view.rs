//! Views and beats as plain values, and as messages. What came over the network is one of them only when it is sound.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::secret::{Commitment, Secret, incarnation_of};
use crate::xds::proto;

/// SHA-256 of a certificate.
pub type Fingerprint = [u8; 32];
/// The public half of an X25519 key.
pub type TunnelKey = [u8; 32];

/// Members of a view.
pub const MOST_MEMBERS: usize = 1024;
/// The longest name of a gateway, bytes.
const LONGEST_NAME: usize = 253;
/// The longest reason of a gateway that can't serve, bytes; the rest of a longer one is left out.
const LONGEST_REASON: usize = 200;
/// Numbers of views stay below this, so that there is always a next one: at one change in each nanosecond it lasts for a century.
const MOST_NUMBER: u64 = 1 << 62;

/// Who serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Each change adds to it; 0: nobody has said anything yet.
    pub number: u64,
    /// How often those who serve have changed; 0: nobody has counted.
    pub serving_changes: u64,
    /// The gateways of the policy, by name, each once.
    pub members: Vec<Member>,
}

/// A gateway in a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it serves.
    pub serving: bool,
    /// Whether it had no lease any more when it stopped to serve.
    pub lapsed: bool,
    /// Higher each time that it stops to serve.
    pub epoch: u64,
    /// Its process; 0: never heard of. Everybody sees it.
    pub incarnation: u64,
    /// Of that process's secret; `None`: it has said none.
    pub commitment: Option<Commitment>,
    /// Of the certificate that it shows other gateways.
    pub fingerprint: Option<Fingerprint>,
    /// Where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Of which the keys of its tunnels follow.
    pub tunnel_key: Option<TunnelKey>,
    /// Why it can't do what it serves for; none: nothing is known to be wrong.
    pub unable: Option<Arc<str>>,
}

/// What a gateway wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// To serve, but it doesn't hold yet what those who serve hold.
    #[default]
    Joining,
    /// To serve, and it holds all that is to be held as of the view that it has seen.
    Ready,
    /// To stop.
    Draining,
}

impl Wish {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// A gateway lives, and wants something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Its name.
    pub gateway: Arc<str>,
    /// Its process.
    pub incarnation: u64,
    /// Of the secret by which it shows that it is this process; `None`: a gateway of before there were secrets.
    pub commitment: Option<Commitment>,
    /// Of the process before, whose secret it knows.
    pub predecessor: Option<Box<Commitment>>,
    /// What it wants.
    pub wish: Wish,
    /// Number of the view that it acts by.
    pub seen_view: u64,
    /// Of the certificate that it shows other gateways.
    pub fingerprint: Option<Fingerprint>,
    /// Where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Of which the keys of its tunnels follow.
    pub tunnel_key: Option<TunnelKey>,
    /// Why it can't do what it serves for. It wants to drain then, for servers that don't know of this.
    pub unable: Option<Arc<str>>,
    /// The last view that it was told, in the first beat of a stream.
    pub view: Option<Arc<View>>,
}

/// Why a message is no view or no beat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    /// A name that can't be one.
    #[error("`{0}` is no gateway's name: 1 to {LONGEST_NAME} bytes without blanks")]
    Name(String),
    /// A process without a number.
    #[error("gateway {0}: incarnation 0 stands for no process")]
    Incarnation(String),
    /// An incarnation that isn't the one of its secret.
    #[error("gateway {0}: its incarnation isn't that of its secret, which has 32 bytes")]
    Secret(String),
    /// A fingerprint of another length.
    #[error("gateway {0}: a fingerprint has 32 bytes, not {1}")]
    Fingerprint(String, usize),
    /// A key of another length.
    #[error("gateway {0}: a tunnel key has 32 bytes, not {1}")]
    TunnelKey(String, usize),
    /// An address that is none.
    #[error("gateway {0}: `{1}` port {2} is no address")]
    Address(String, String, u32),
    /// A wish that isn't known.
    #[error("gateway {0}: wish {1} isn't known")]
    Wish(String, i32),
    /// Numbers that grow beyond all measure.
    #[error("view {0}: its number, or an epoch or a count in it, is too high")]
    Number(u64),
    /// Too many members.
    #[error("view {0}: {1} members are more than {MOST_MEMBERS}")]
    TooMany(u64, usize),
    /// A member twice.
    #[error("view {0}: gateway {1} is in it twice")]
    Twice(u64, String),
}

impl View {
    /// The member with this name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        let at = self.members.binary_search_by(|member| (*member.name).cmp(name)).ok()?;
        self.members.get(at)
    }

    /// Whether there is room for many views after it. Gateways, which say what the next number is, must leave that.
    ///
    /// # Errors
    /// When there isn't.
    pub fn leaves_room(&self) -> Result<(), Unsound> {
        if self.number < MOST_NUMBER / 2 { Ok(()) } else { Err(Unsound::Number(self.number)) }
    }

    /// Those who serve.
    pub fn serving(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.serving)
    }

    /// How often those who serve have changed, at most: where nobody has counted, each view may have changed them.
    pub fn most_serving_changes(&self) -> u64 {
        if self.serving_changes == 0 { self.number } else { self.serving_changes }
    }

    /// Whether in another view the same ones serve, and have served all the time between the two.
    pub fn serves_alike(&self, other: &Self) -> bool {
        fn epoch(member: &Member) -> (&str, u64) {
            (&member.name, member.epoch)
        }
        self.serving().map(epoch).eq(other.serving().map(epoch))
    }
}

impl Member {
    /// One that nobody has heard of.
    pub fn new(name: Arc<str>, epoch: u64) -> Self {
        Self {
            name,
            serving: false,
            lapsed: false,
            epoch,
            incarnation: 0,
            commitment: None,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            unable: None,
        }
    }
}

impl TryFrom<proto::View> for View {
    type Error = Unsound;

    fn try_from(message: proto::View) -> Result<Self, Unsound> {
        let proto::View { number, members, serving_changes } = message;
        if members.len() > MOST_MEMBERS {
            return Err(Unsound::TooMany(number, members.len()));
        }
        let counts = members.iter().map(|member| member.epoch).chain([serving_changes]);
        if number >= MOST_NUMBER || counts.max() > Some(number) {
            return Err(Unsound::Number(number));
        }
        let mut members = members.into_iter().map(Member::try_from).collect::<Result<Vec<_>, _>>()?;
        members.sort_by(|a, b| a.name.cmp(&b.name));
        let mut names = BTreeSet::new();
        match members.iter().find(|member| !names.insert(&member.name)) {
            Some(twice) => Err(Unsound::Twice(number, twice.name.to_string())),
            None => Ok(Self { number, serving_changes, members }),
        }
    }
}

impl From<&View> for proto::View {
    fn from(view: &View) -> Self {
        Self {
            number: view.number,
            serving_changes: view.serving_changes,
            members: view.members.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<proto::Member> for Member {
    type Error = Unsound;

    fn try_from(message: proto::Member) -> Result<Self, Unsound> {
        let proto::Member { name, serving, epoch, incarnation, fingerprint, address, port, lapsed, .. } = message;
        let (tunnel_key, unable, commitment) = (message.tunnel_key, message.unable, message.commitment);
        let (name, fingerprint) = (checked_name(name)?, checked_hash(fingerprint));
        let fingerprint = fingerprint.map_err(|bytes| Unsound::Fingerprint(name.to_string(), bytes))?;
        let tunnel_key = checked_hash(tunnel_key).map_err(|bytes| Unsound::TunnelKey(name.to_string(), bytes))?;
        let peer = checked_peer(&name, &address, port)?;
        let commitment = checked_commitment(&name, incarnation, &commitment)?;
        Ok(Self {
            name,
            serving,
            lapsed,
            epoch,
            incarnation,
            commitment,
            fingerprint,
            peer,
            tunnel_key,
            unable: checked_reason(&unable),
        })
    }
}

impl From<&Member> for proto::Member {
    fn from(member: &Member) -> Self {
        let (address, port) = peer_fields(member.peer);
        Self {
            name: member.name.to_string(),
            serving: member.serving,
            lapsed: member.lapsed,
            epoch: member.epoch,
            incarnation: member.incarnation,
            fingerprint: member.fingerprint.map(Vec::from).unwrap_or_default(),
            address,
            port,
            tunnel_key: member.tunnel_key.map(Vec::from).unwrap_or_default(),
            unable: member.unable.as_deref().unwrap_or_default().to_owned(),
            commitment: member.commitment.map(Vec::from).unwrap_or_default(),
        }
    }
}

impl From<Wish> for proto::beat::Wish {
    fn from(wish: Wish) -> Self {
        match wish {
            Wish::Joining => Self::Joining,
            Wish::Ready => Self::Ready,
            Wish::Draining => Self::Draining,
        }
    }
}

impl From<proto::beat::Wish> for Wish {
    fn from(wish: proto::beat::Wish) -> Self {
        match wish {
            proto::beat::Wish::Joining => Self::Joining,
            proto::beat::Wish::Ready => Self::Ready,
            proto::beat::Wish::Draining => Self::Draining,
        }
    }
}

/// From a gateway: what it claims to be, its secret must show.
impl TryFrom<proto::Beat> for Beat {
    type Error = Unsound;

    fn try_from(mut message: proto::Beat) -> Result<Self, Unsound> {
        let secret = std::mem::take(&mut message.secret);
        message.commitment = Vec::new();
        if !secret.is_empty() {
            let secret = Secret::from_slice(&secret).ok_or_else(|| Unsound::Secret(message.gateway.clone()))?;
            message.commitment = secret.commitment().into();
        }
        let predecessor = Secret::from_slice(&message.predecessor).map(|secret| Box::new(secret.commitment()));
        let beat = Self { predecessor, ..Self::kept(message)? };
        beat.view.as_deref().map_or(Ok(()), View::leaves_room)?;
        Ok(beat)
    }
}

#[cfg(test)]
impl Beat {
    /// One that says nothing else, for tests.
    pub(crate) fn bare(gateway: &str, incarnation: u64, wish: Wish, seen_view: u64) -> Self {
        Self {
            gateway: gateway.into(),
            incarnation,
            commitment: None,
            predecessor: None,
            wish,
            seen_view,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            unable: None,
            view: None,
        }
    }
}

impl Beat {
    /// As a server has kept it.
    ///
    /// # Errors
    /// When it isn't sound.
    pub fn kept(message: proto::Beat) -> Result<Self, Unsound> {
        let proto::Beat { gateway, incarnation, wish, seen_view, fingerprint, tunnel_key, unable, view, .. } = message;
        let (peer_address, peer_port) = (message.peer_address, message.peer_port);
        let (gateway, unable) = (checked_name(gateway)?, checked_reason(&unable));
        if incarnation == 0 {
            return Err(Unsound::Incarnation(gateway.to_string()));
        }
        let commitment = checked_commitment(&gateway, incarnation, &message.commitment)?;
        let wish = proto::beat::Wish::try_from(wish).map_err(|_| Unsound::Wish(gateway.to_string(), wish))?.into();
        let fingerprint =
            checked_hash(fingerprint).map_err(|bytes| Unsound::Fingerprint(gateway.to_string(), bytes))?;
        let tunnel_key = checked_hash(tunnel_key).map_err(|bytes| Unsound::TunnelKey(gateway.to_string(), bytes))?;
        let peer = checked_peer(&gateway, &peer_address, peer_port)?;
        let view = view.map(View::try_from).transpose()?.map(Arc::new);
        Ok(Self {
            gateway,
            incarnation,
            commitment,
            predecessor: None,
            wish,
            seen_view,
            fingerprint,
            peer,
            tunnel_key,
            unable,
            view,
        })
    }

    /// As a message for those who keep it: the so-manieth of its stream. No secret is in it.
    pub fn message(&self, sequence: u64) -> proto::Beat {
        let (peer_address, peer_port) = peer_fields(self.peer);
        proto::Beat {
            gateway: self.gateway.to_string(),
            incarnation: self.incarnation,
            sequence,
            wish: proto::beat::Wish::from(self.wish).into(),
            seen_view: self.seen_view,
            fingerprint: self.fingerprint.map(Vec::from).unwrap_or_default(),
            peer_address,
            peer_port,
            unable: self.unable.as_deref().unwrap_or_default().to_owned(),
            view: self.view.as_deref().map(Into::into),
            tunnel_key: self.tunnel_key.map(Vec::from).unwrap_or_default(),
            commitment: self.commitment.map(Vec::from).unwrap_or_default(),
            ..proto::Beat::default()
        }
    }
}

fn checked_name(name: String) -> Result<Arc<str>, Unsound> {
    let is_name = (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ' ');
    if is_name { Ok(name.into()) } else { Err(Unsound::Name(name)) }
}

/// What people are shown: a line that isn't too long.
fn checked_reason(text: &str) -> Option<Arc<str>> {
    let end = text.floor_char_boundary(LONGEST_REASON);
    let line: String = text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (!line.is_empty()).then(|| line.into())
}

/// None of nothing.
fn checked_commitment(name: &str, incarnation: u64, bytes: &[u8]) -> Result<Option<Commitment>, Unsound> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let commitment = Commitment::try_from(bytes).ok().filter(|it| incarnation_of(it) == incarnation);
    commitment.map(Some).ok_or_else(|| Unsound::Secret(name.to_owned()))
}

/// 32 bytes, or none of nothing; of another length, that length.
fn checked_hash(bytes: Vec<u8>) -> Result<Option<[u8; 32]>, usize> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.try_into().map(Some).map_err(|bytes: Vec<u8>| bytes.len())
}

fn checked_peer(name: &str, address: &str, port: u32) -> Result<Option<SocketAddr>, Unsound> {
    if address.is_empty() {
        return Ok(None);
    }
    let unsound = || Unsound::Address(name.to_owned(), address.to_owned(), port);
    let ip: IpAddr = address.parse().map_err(|_| unsound())?;
    let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(unsound)?;
    Ok(Some((ip, port).into()))
}

fn peer_fields(peer: Option<SocketAddr>) -> (String, u32) {
    peer.map_or_else(Default::default, |peer| (peer.ip().to_string(), peer.port().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str) -> Member {
        let secret = Secret::from_slice(&[5; 32]).unwrap();
        Member {
            serving: true,
            incarnation: secret.incarnation(),
            commitment: Some(secret.commitment()),
            fingerprint: Some([3; 32]),
            peer: Some("[2001:db8::1]:4790".parse().unwrap()),
            tunnel_key: Some([4; 32]),
            unable: Some("interface gw-out is gone".into()),
            ..Member::new(name.into(), 4)
        }
    }

    #[test]
    fn a_view_survives_the_way() {
        let view = View { number: 5, serving_changes: 3, members: vec![member("a"), Member::new("b".into(), 5)] };
        let mut message = proto::View::from(&view);
        message.members.reverse();
        assert_eq!(View::try_from(message), Ok(view.clone()), "members are in order again");
        assert_eq!(view.member("b").map(|it| it.epoch), Some(5));
        assert_eq!(view.member("c"), None);
        assert_eq!(view.serving().count(), 1);
    }

    #[test]
    fn a_beat_survives_the_way() {
        let (secret, before) = ([3; 32], [4; 32]);
        let known = |bytes: [u8; 32]| Secret::from_slice(&bytes).unwrap();
        let beat = Beat {
            gateway: "a".into(),
            incarnation: known(secret).incarnation(),
            commitment: Some(known(secret).commitment()),
            predecessor: Some(Box::new(known(before).commitment())),
            wish: Wish::Draining,
            seen_view: 9,
            fingerprint: Some([1; 32]),
            peer: Some("192.0.2.1:4790".parse().unwrap()),
            tunnel_key: Some([2; 32]),
            unable: Some("interface gw-out has no carrier".into()),
            view: Some(Arc::new(View { number: 1, ..View::default() })),
        };
        let kept = beat.message(3);
        assert!(kept.secret.is_empty() && kept.predecessor.is_empty(), "no server writes a secret down");
        assert_eq!(Beat::kept(kept.clone()), Ok(Beat { predecessor: None, ..beat.clone() }));
        let sent = proto::Beat { secret: secret.into(), predecessor: before.into(), ..kept.clone() };
        assert_eq!(Beat::try_from(sent.clone()), Ok(beat.clone()));
        // A commitment, which everybody sees, is no secret.
        assert_eq!(Beat::try_from(kept).map(|it| it.commitment), Ok(None));
        for secret in [vec![4; 32], vec![3; 31], beat.commitment.unwrap().into()] {
            let unsound = proto::Beat { secret, ..sent.clone() };
            assert_eq!(Beat::try_from(unsound), Err(Unsound::Secret("a".into())));
        }
        let view = proto::View { number: MOST_NUMBER / 2, ..proto::View::default() };
        let last = proto::Beat { view: Some(view), ..sent };
        assert_eq!(Beat::try_from(last), Err(Unsound::Number(MOST_NUMBER / 2)), "there would be no number left");
    }

    #[test]
    fn a_reason_is_one_line_that_is_not_too_long() {
        let beat =
            |unable: String| proto::Beat { gateway: "a".into(), incarnation: 1, unable, ..proto::Beat::default() };
        let read = |text: &str| Beat::try_from(beat(text.to_owned())).unwrap().unable;
        assert_eq!(read(""), None);
        assert_eq!(read("a\nb").as_deref(), Some("a b"));
        assert_eq!(read(&"\u{e4}".repeat(300)).map(|it| it.len()), Some(LONGEST_REASON));
    }

    #[test]
    fn what_is_unsound_is_refused() {
        let sound = View { number: 5, serving_changes: 5, members: vec![member("a")] };
        let of = |change: &dyn Fn(&mut proto::View)| {
            let mut message = proto::View::from(&sound);
            change(&mut message);
            View::try_from(message).unwrap_err()
        };
        assert_eq!(of(&|view| view.members[0].name = "a b".into()), Unsound::Name("a b".into()));
        assert_eq!(of(&|view| view.members[0].fingerprint = vec![0; 31]), Unsound::Fingerprint("a".into(), 31));
        assert_eq!(of(&|view| view.members[0].tunnel_key = vec![0; 33]), Unsound::TunnelKey("a".into(), 33));
        assert_eq!(of(&|view| view.members[0].incarnation += 1), Unsound::Secret("a".into()));
        assert_eq!(of(&|view| view.members[0].port = 65536), Unsound::Address("a".into(), "2001:db8::1".into(), 65536));
        assert_eq!(of(&|view| view.members[0].epoch = 6), Unsound::Number(5));
        assert_eq!(of(&|view| view.serving_changes = 6), Unsound::Number(5));
        assert_eq!(of(&|view| view.number = u64::MAX), Unsound::Number(u64::MAX));
        assert_eq!(of(&|view| view.members.push(view.members[0].clone())), Unsound::Twice(5, "a".into()));
        let many = vec![proto::Member::default(); MOST_MEMBERS + 1];
        assert_eq!(of(&|view| view.members.clone_from(&many)), Unsound::TooMany(5, MOST_MEMBERS + 1));
        let beat = proto::Beat { gateway: "a".into(), incarnation: 1, ..proto::Beat::default() };
        assert!(Beat::try_from(beat.clone()).is_ok());
        assert_eq!(
            Beat::try_from(proto::Beat { incarnation: 0, ..beat.clone() }),
            Err(Unsound::Incarnation("a".into()))
        );
        assert_eq!(Beat::try_from(proto::Beat { wish: 9, ..beat }), Err(Unsound::Wish("a".into(), 9)));
    }
}
