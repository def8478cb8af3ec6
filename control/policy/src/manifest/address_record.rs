//! The record of the addresses of pools: who has which, and which are quarantined since their owner gave them up. Lines of
//! text: in the status of the pools, or beside other sources.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use k8s_openapi::jiff::Timestamp;

use super::{Kind, ObjectId, ReuseAfter};

/// Lines about addresses that nobody has and anybody may get, bytes at most; those that are free for longest are forgotten
/// first. An object of Kubernetes and a value of etcd have at most 1.5 MiB, for those that somebody has, too.
const MAX_FREE_BYTES: usize = 256 << 10;
/// The longest address, kind and time, and the spaces between, bytes.
const MAX_WORDS_OF_LINE: usize = 96;

/// Who has an address, or had it last. Displays as `EgressPolicy namespace/name`, and with the time since when it is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// A policy, or a Service.
    pub owner: ObjectId,
    /// Since when it doesn't have the address any more; `None`: it has it.
    pub freed: Option<Timestamp>,
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.freed {
            None => write!(f, "{}", self.owner),
            Some(freed) => write!(f, "{} {freed}", self.owner),
        }
    }
}

/// Why a line isn't one of a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an address with its owner: write 203.0.113.4 EgressPolicy namespace/name, and since when it is free"
)]
pub struct InvalidLine(String);

/// Who has which addresses. Displays as a line for each, which [`FromStr`] reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressRecord {
    holdings: BTreeMap<IpAddr, Holding>,
}

impl AddressRecord {
    /// A record of these lines.
    ///
    /// # Errors
    /// The first one that isn't one.
    pub fn from_lines<'a>(lines: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidLine> {
        let holdings: Result<BTreeMap<IpAddr, Holding>, InvalidLine> = lines.into_iter().map(line).collect();
        Ok(Self { holdings: holdings? })
    }

    /// Its lines, by address.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.iter().map(|(address, holding)| format!("{address} {holding}"))
    }

    /// All addresses.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, &Holding)> {
        self.holdings.iter().map(|(address, holding)| (*address, holding))
    }

    /// Who has an address, or had it last.
    pub fn get(&self, address: IpAddr) -> Option<&Holding> {
        self.holdings.get(&address)
    }

    /// Whether an address is recorded as what this object has.
    pub fn is_given_to(&self, address: IpAddr, owner: &ObjectId) -> bool {
        self.get(address).is_some_and(|holding| holding.freed.is_none() && holding.owner == *owner)
    }

    /// Adds an address.
    pub(crate) fn insert(&mut self, address: IpAddr, holding: Holding) {
        self.holdings.insert(address, holding);
    }

    /// Adds the addresses of another record, where this one has none.
    pub fn extend(&mut self, other: &Self) {
        for (address, holding) in &other.holdings {
            self.holdings.entry(*address).or_insert_with(|| holding.clone());
        }
    }

    /// The record once objects have these addresses. Of several objects that share an address its owner stays its owner.
    /// An address that isn't in a pool is forgotten when it is free, unless not all pools are known (`is_partial`). `is_kept`:
    /// its owner isn't known to have given it up; `reuse_after`: of the pool with an address.
    #[must_use]
    pub(crate) fn next<'a>(
        &self,
        given: impl IntoIterator<Item = (IpAddr, &'a ObjectId)>,
        is_kept: impl Fn(&ObjectId) -> bool,
        (reuse_after, is_partial): (impl Fn(IpAddr) -> Option<ReuseAfter>, bool),
        now: Timestamp,
    ) -> Self {
        let mut holdings = BTreeMap::new();
        for (address, owner) in given {
            // The first one that is named, but for its owner.
            if !holdings.contains_key(&address) || self.is_given_to(address, owner) {
                holdings.insert(address, Holding { owner: owner.clone(), freed: None });
            }
        }
        let mut free = Vec::new();
        for (address, Holding { owner, freed }) in &self.holdings {
            if holdings.contains_key(address) {
                continue;
            }
            let freed = match freed {
                None if is_kept(owner) => None,
                // A clock that was ahead is right again: the quarantine begins now.
                freed => Some(freed.unwrap_or(now).min(now)),
            };
            match freed.map(|freed| (freed, reuse_after(*address))) {
                Some((_, None)) if !is_partial => continue,
                Some((freed, Some(reuse_after))) if end_of_quarantine(freed, reuse_after) <= now => {
                    free.push((freed, *address, MAX_WORDS_OF_LINE + owner.namespace.len() + owner.name.len()));
                }
                _ => {}
            }
            holdings.insert(*address, Holding { owner: owner.clone(), freed });
        }
        free.sort_unstable();
        let mut bytes: usize = free.iter().map(|(.., bytes)| bytes).sum();
        for (_, address, of_line) in free {
            if bytes <= MAX_FREE_BYTES {
                break;
            }
            bytes -= of_line;
            holdings.remove(&address);
        }
        Self { holdings }
    }
}

impl fmt::Display for AddressRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl FromStr for AddressRecord {
    type Err = InvalidLine;

    fn from_str(text: &str) -> Result<Self, InvalidLine> {
        Self::from_lines(text.lines())
    }
}

/// When others may have an address.
pub(crate) fn end_of_quarantine(freed: Timestamp, ReuseAfter(reuse_after): ReuseAfter) -> Timestamp {
    freed.checked_add(reuse_after).unwrap_or(Timestamp::MAX)
}

fn line(text: &str) -> Result<(IpAddr, Holding), InvalidLine> {
    read_line(text).ok_or_else(|| InvalidLine(text.to_owned()))
}

fn read_line(text: &str) -> Option<(IpAddr, Holding)> {
    let mut words = text.split(' ');
    let (address, kind, path) = (words.next()?.parse().ok()?, Kind::named(words.next()?)?, words.next()?);
    let freed = words.next().map(str::parse).transpose().ok()?;
    let (namespace, name) = path.split_once('/').unwrap_or(("", path));
    let owner = ObjectId { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    let is_whole = words.next().is_none() && !name.is_empty() && namespace.is_empty() != kind.is_namespaced();
    is_whole.then_some((address, Holding { owner, freed }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(lines: &[&str]) -> AddressRecord {
        AddressRecord::from_lines(lines.iter().copied()).unwrap()
    }

    fn at(minute: u8) -> Timestamp {
        format!("2026-01-01T00:{minute:02}:00Z").parse().unwrap()
    }

    fn policy(name: &str) -> ObjectId {
        ObjectId { kind: Kind::EgressPolicy, namespace: "t".to_owned(), name: name.to_owned() }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = "192.0.2.1 EgressPolicy t/p\n192.0.2.2 ClusterEgressPolicy all 2026-01-01T00:00:01.5Z\n\
                    2001:db8::1 Service t/s 2026-01-01T00:00:00Z\n";
        assert_eq!(text.parse::<AddressRecord>().unwrap().to_string(), text);
        for bad in [
            "",
            "192.0.2.1",
            "192.0.2.1 EgressPolicy",
            "192.0.2.1 EgressPolicy p",
            "192.0.2.1 ClusterEgressPolicy t/p",
            "192.0.2.1 EgressPolicy t/",
            "192.0.2.1 Secret t/p",
            "192.0.2.1 EgressPolicy t/p yesterday",
            "192.0.2.1 EgressPolicy t/p 2026-01-01T00:00:00Z more",
            "192.0.2.300 EgressPolicy t/p",
        ] {
            let expected = format!("`{bad}` is not an address with its owner");
            let error = AddressRecord::from_lines([bad]).unwrap_err().to_string();
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn an_address_is_free_from_when_its_owner_is_gone() {
        let before = record(&[
            "192.0.2.1 EgressPolicy t/stays",
            "192.0.2.2 EgressPolicy t/goes",
            "192.0.2.3 EgressPolicy t/unreadable",
            "192.0.2.4 EgressPolicy t/gone 2025-12-31T00:00:00Z",
            "192.0.2.5 EgressPolicy t/back 2025-12-31T00:00:00Z",
            "192.0.3.1 EgressPolicy t/goes",
            "192.0.3.2 EgressPolicy t/unreadable",
        ]);
        let (stays, back, new) = (policy("stays"), policy("back"), policy("new"));
        let address = |last| IpAddr::from([192, 0, 2, last]);
        let given = [(address(1), &stays), (address(5), &back), (address(6), &new)];
        let is_kept = |owner: &ObjectId| owner.name == "unreadable";
        let pool = |address: IpAddr| (address < IpAddr::from([192, 0, 3, 0])).then(ReuseAfter::default);
        let next = before.next(given, is_kept, (pool, false), at(1));
        let expected = record(&[
            "192.0.2.1 EgressPolicy t/stays",
            "192.0.2.2 EgressPolicy t/goes 2026-01-01T00:01:00Z",
            "192.0.2.3 EgressPolicy t/unreadable",
            "192.0.2.4 EgressPolicy t/gone 2025-12-31T00:00:00Z",
            "192.0.2.5 EgressPolicy t/back",
            "192.0.2.6 EgressPolicy t/new",
            "192.0.3.2 EgressPolicy t/unreadable",
        ]);
        assert_eq!(next, expected);
        assert_eq!(next.next(given, is_kept, (pool, false), at(2)), next, "nothing changes with time alone");
    }

    #[test]
    fn who_shares_an_address_becomes_its_owner_when_the_owner_goes() {
        let (a, b) = (policy("a"), policy("b"));
        let address = IpAddr::from([192, 0, 2, 1]);
        let next = |record: &AddressRecord, given: &[(IpAddr, &ObjectId)]| {
            record.next(given.iter().copied(), |_| false, (|_| Some(ReuseAfter::default()), false), at(0))
        };
        let of_b = next(&AddressRecord::default(), &[(address, &b)]);
        let both = next(&of_b, &[(address, &a), (address, &b)]);
        assert!(both.is_given_to(address, &b));
        assert!(next(&both, &[(address, &a)]).is_given_to(address, &a));
    }

    #[test]
    fn what_is_free_for_longest_is_forgotten_first_and_nothing_that_is_quarantined() {
        let line = |n: usize| format!("10.0.{}.{} EgressPolicy t/p 2026-01-01T00:{:02}:00Z", n >> 8, n & 255, n % 60);
        let lines: Vec<String> = (0..6000).map(line).collect();
        let full = AddressRecord::from_lines(lines.iter().map(String::as_str)).unwrap();
        let next = full.next([], |_| false, (|_| Some(ReuseAfter::default()), false), at(59));
        assert_eq!(next.get(IpAddr::from([10, 0, 0, 0])), None);
        let quarantined = |record: &AddressRecord| record.iter().filter(|(_, it)| it.freed > Some(at(54))).count();
        assert_eq!(quarantined(&next), quarantined(&full));
        let free = next.iter().count() - quarantined(&next);
        assert!(free > 2000 && free * (MAX_WORDS_OF_LINE + 2) <= MAX_FREE_BYTES, "{free}");
    }

    #[test]
    fn a_clock_that_was_ahead_quarantines_for_no_longer() {
        let ahead = record(&["192.0.2.1 EgressPolicy t/p 2027-01-01T00:00:00Z"]);
        let next = ahead.next([], |_| false, (|_| Some(ReuseAfter::default()), false), at(1));
        assert_eq!(next, record(&["192.0.2.1 EgressPolicy t/p 2026-01-01T00:01:00Z"]));
    }
}
