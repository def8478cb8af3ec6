//! Who else uses the bits of marks that are vipgate's: rules of nftables and iptables, and routing rules, that match or
//! set them. Pure.

use std::collections::BTreeMap;

use crate::marks::MarkMask;
use crate::nft::table::TABLE;

/// Rules of others by place (`chain CHAIN of table FAMILY NAME`, `IPv4 rule PRIORITY`), and the bits of the mask that they
/// use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MarkUsers(BTreeMap<String, u32>);

impl MarkUsers {
    /// The places of rules, and the bits.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|(place, bits)| (place.as_str(), *bits))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds those of a ruleset, as `nft list ruleset` prints it.
    pub fn add_ruleset(&mut self, mask: MarkMask, listing: &str) {
        let (mut table, mut chain) = ("", "");
        for line in listing.lines().map(str::trim_start) {
            if let Some(name) = line.strip_prefix("table ") {
                table = name.trim_end_matches(" {");
            } else if let Some(name) = line.strip_prefix("chain ") {
                chain = name.trim_end_matches(" {");
            } else if line.contains("mark") && table != TABLE {
                self.add(mask, nftables_bits(&words(line)), || format!("chain {chain} of table {table}"));
            }
        }
    }

    /// Adds those of iptables, as `iptables-save` prints them. `family` is as in nftables.
    pub fn add_iptables(&mut self, mask: MarkMask, family: &str, listing: &str) {
        let mut table = "";
        for line in listing.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name;
            } else if let Some(("-A", rule)) = line.split_once(' ') {
                let (chain, rule) = rule.split_once(' ').unwrap_or_default();
                let bits = iptables_bits(&words(rule));
                self.add(mask, bits, || format!("chain {chain} of table {family} {table}"));
            }
        }
    }

    /// Adds a routing rule that matches a mark.
    pub fn add_rule(&mut self, mask: MarkMask, rule: MarkRule) {
        let MarkRule { is_ipv6, priority, mark } = rule;
        let version = if is_ipv6 { "IPv6" } else { "IPv4" };
        self.add(mask, bits_of(mark), || format!("{version} rule {priority}"));
    }

    fn add(&mut self, mask: MarkMask, bits: u32, place: impl FnOnce() -> String) {
        let bits = bits & mask.bits();
        if bits != 0 {
            *self.0.entry(place()).or_default() |= bits;
        }
    }
}

/// A routing rule that matches a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkRule {
    /// Whether it is one of IPv6.
    pub is_ipv6: bool,
    pub priority: u32,
    /// Value and mask.
    pub mark: (u32, u32),
}

/// The bits of a value and its mask. Without a mask the whole mark is compared, with a number such as WireGuard's 0xca6c:
/// its zeros conflict with nobody's bits.
fn bits_of((value, mask): (u32, u32)) -> u32 {
    if mask == u32::MAX { value } else { value | mask }
}

/// The words of a rule; those of a set, too.
fn words(rule: &str) -> Vec<&str> {
    let is_separator = |c: char| c.is_whitespace() || matches!(c, ',' | '{' | '}' | '(' | ')');
    let mut words: Vec<&str> = Vec::new();
    for word in rule.split(is_separator).filter(|word| !word.is_empty()) {
        // nft's translation of an iptables rule may leave it out.
        if word == "mark" && !matches!(words.last(), Some(&("meta" | "ct"))) {
            words.push("meta");
        }
        words.push(word);
    }
    words
}

fn number(word: &str) -> Option<u32> {
    match word.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

/// The bits that a rule of nftables matches or sets.
fn nftables_bits(mut rule: &[&str]) -> u32 {
    let mut bits = 0;
    loop {
        rule = match rule {
            [] => return bits,
            [key @ ("meta" | "ct"), "mark", "set", value @ ..] => {
                let (set, rest) = set_bits(key, value);
                bits |= set;
                rest
            }
            ["meta" | "ct", "mark", "&" | "and", mask, rest @ ..] => {
                bits |= number(mask).unwrap_or_default();
                rest
            }
            ["meta" | "ct", "mark", rest @ ..] => {
                let is_operator = |word: &&&str| matches!(**word, "==" | "!=" | "vmap");
                let numbers = rest.iter().skip_while(is_operator).map_while(|word| number(word));
                bits |= numbers.fold(0, |all, one| all | one);
                rest
            }
            [_, rest @ ..] => rest,
        };
    }
}

/// The bits that `KEY mark set VALUE` changes, and what follows. A value consists of marks under masks, and of numbers.
fn set_bits<'a, 'b>(key: &str, mut value: &'b [&'a str]) -> (u32, &'b [&'a str]) {
    let mut bits = 0;
    loop {
        let rest = match value {
            [source @ ("meta" | "ct"), "mark", "&" | "and", mask, rest @ ..] => {
                // Of the mark itself these bits stay.
                bits |= number(mask).map_or(0, |mask| if *source == key { !mask } else { mask });
                rest
            }
            [source @ ("meta" | "ct"), "mark", rest @ ..] => {
                bits |= if *source == key { 0 } else { u32::MAX };
                rest
            }
            [word, rest @ ..] => {
                let Some(number) = number(word) else { return (bits, value) };
                bits |= number;
                rest
            }
            [] => return (bits, value),
        };
        match rest {
            ["|" | "or" | "^" | "xor", rest @ ..] => value = rest,
            _ => return (bits, rest),
        }
    }
}

/// The bits that a rule of iptables matches or sets.
fn iptables_bits(rule: &[&str]) -> u32 {
    let of_option = |pair: &[&str]| match pair {
        ["--mark" | "--set-xmark" | "--set-mark" | "--tproxy-mark", text] => {
            let (value, mask) = text.split_once('/').unwrap_or((*text, "0xffffffff"));
            number(value).zip(number(mask)).map_or(0, bits_of)
        }
        ["--nfmask" | "--ctmask", mask] => number(mask).unwrap_or_default(),
        _ => 0,
    };
    rule.windows(2).map(of_option).fold(0, |all, one| all | one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_nftables(rule: &str) -> u32 {
        nftables_bits(&words(rule))
    }

    fn of_iptables(rule: &str) -> u32 {
        iptables_bits(&words(rule))
    }

    #[test]
    fn the_bits_of_a_rule_are_those_that_it_matches_or_sets() {
        for (rule, bits) in [
            // portmap and kube-proxy, as nft lists them with iptables' extensions, and without.
            ("meta mark & 0x00002000 == 0x00002000 counter masquerade", 0x2000),
            ("counter meta mark set mark or 0x2000", 0x2000),
            ("meta mark set meta mark | 0x00004000", 0x4000),
            ("meta mark set meta mark ^ 0x00004000", 0x4000),
            ("xt match \"mark\" counter xt target \"MASQUERADE\"", 0),
            // vipgate's own form.
            ("meta mark set meta mark & 0xffffe0ff | 0x00000100", 0x1f00),
            ("oifname \"a\" meta mark set meta mark & 0xffffe0ff accept", 0x1f00),
            ("ct direction reply ct mark & 0x00001f00 vmap @replies", 0x1f00),
            // Whole numbers: their bits.
            ("meta mark 0x0000ca6c accept", 0xca6c),
            ("meta mark != { 0x00000000, 0x00000300 } drop", 0x300),
            ("meta mark vmap { 0x00000100 : drop }", 0x100),
            ("meta mark 0x00000001 meta mark set 0x00000200 accept", 0x201),
            // From one mark to the other: all bits that the mask has.
            ("ct mark set meta mark", u32::MAX),
            ("meta mark set ct mark & 0x000000ff", 0xff),
            ("meta mark set (meta mark & 0xff00ffff) | (ct mark & 0x00ff0000)", 0x00ff_0000),
            ("ct mark set ct mark and 0xffffffed xor 0x16", 0x16),
            ("tcp dport 80 comment \"a mark\" accept", 0),
            ("meta mark set ip saddr map @marks", 0),
            ("meta mark set", 0),
            ("ct mark", 0),
        ] {
            assert_eq!(of_nftables(rule), bits, "{rule}: {:#x}", of_nftables(rule));
        }
        for (rule, bits) in [
            ("-m mark --mark 0x2000/0x2000 -j MASQUERADE", 0x2000),
            ("-m comment --comment \"CNI portfwd masquerade mark\" -j MARK --set-xmark 0x2000/0x2000", 0x2000),
            ("-j MARK --set-xmark 0x0/0x8000", 0x8000),
            ("-j MARK --set-xmark 0x539/0xffffffff", 0x539),
            ("-i eth0 -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80", 0x80),
            ("-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff", u32::MAX),
            ("-m mark ! --mark 0x1 -j ACCEPT", 1),
            ("-p tcp -j TPROXY --on-port 15001 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff", 0x200),
            ("-j ACCEPT --mark", 0),
        ] {
            assert_eq!(of_iptables(rule), bits, "{rule}: {:#x}", of_iptables(rule));
        }
    }

    #[test]
    fn who_uses_bits_of_the_mask_is_named_and_vipgate_itself_is_not() {
        let listing = "\
# Warning: table ip nat is managed by iptables-nft, do not touch!
table ip nat {
\tchain CNI-HOSTPORT-SETMARK {
\t\t counter meta mark set mark or 0x2000
\t}

\tchain CNI-HOSTPORT-MASQ {
\t\tmeta mark & 0x00002000 == 0x00002000 counter masquerade
\t}
}
table inet vipgate {
\tchain pass {
\t\tmeta mark set meta mark & 0xffffc0ff
\t}
}
table inet other {
\tmap marks {
\t\ttype mark : verdict
\t}

\tchain out {
\t\ttype filter hook output priority 0; policy accept;
\t\tmeta mark & 0x00000f00 == 0x00000100 meta mark & 0x000000ff == 0x00000001 drop
\t}
}
";
        let saved = "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m mark --mark 0x3/0x103 -j ACCEPT\nCOMMIT\n";
        let users = |mask| {
            let (mask, mut users) = (MarkMask::new(mask).unwrap(), MarkUsers::default());
            users.add_ruleset(mask, listing);
            users.add_iptables(mask, "ip6", saved);
            for (priority, mark) in [(32765, (0xca6c, u32::MAX)), (100, (0x1_0000, 0x1_0000))] {
                users.add_rule(mask, MarkRule { is_ipv6: priority == 32765, priority, mark });
            }
            users.iter().map(|(place, bits)| (place.to_owned(), bits)).collect::<Vec<_>>()
        };
        let named = |list: &[(&str, u32)]| -> Vec<(String, u32)> {
            list.iter().map(|(place, bits)| ((*place).to_owned(), *bits)).collect()
        };
        let setmark = ("chain CNI-HOSTPORT-SETMARK of table ip nat", 0x2000);
        let masq = ("chain CNI-HOSTPORT-MASQ of table ip nat", 0x2000);
        let others = [
            ("IPv6 rule 32765", 0xa00),
            ("chain PREROUTING of table ip6 mangle", 0x100),
            ("chain out of table inet other", 0xf00),
        ];
        assert_eq!(users(0x3f00), named(&[others[0], masq, setmark, others[1], others[2]]));
        assert_eq!(users(0x1f00), named(&others));
        assert!(users(0x70_0000).is_empty());
    }
}
