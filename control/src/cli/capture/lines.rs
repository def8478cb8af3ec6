//! Captured packets as lines of text or JSON.

use serde::Serialize;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::wire::protocol;

use crate::admin::capture::CapturedPacket;
use crate::admin::filter::{protocol_name, source_and_destination};
use crate::command_error::CommandError;
use crate::output::sanitize;

/// JSON form of a packet. Address and port are one string, as in the other commands.
#[derive(Serialize)]
struct Line<'a> {
    time_ms: u64,
    worker: u32,
    interface: &'a str,
    protocol: String,
    source: String,
    destination: String,
    length: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_after: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_after: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tunnel_source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tunnel_destination: Option<String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    direction: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
    verdict: &'a str,
}

pub(super) fn json(packet: &CapturedPacket, interfaces: &[String]) -> Result<String, CommandError> {
    let (before, (after, tunnel)) = (PacketSummary::of(&packet.before), translated(packet));
    let [source, destination] = before.map(|it| source_and_destination(&it)).unwrap_or_default();
    let texts = |it: Option<PacketSummary>| it.map(|it| source_and_destination(&it).map(Some)).unwrap_or_default();
    let ([source_after, destination_after], [tunnel_source, tunnel_destination]) = (texts(after), texts(tunnel));
    let line = Line {
        time_ms: packet.time_ms,
        worker: packet.worker,
        interface: name(interfaces, packet.interface),
        protocol: before.map(|it| protocol_name(it.protocol)).unwrap_or_default(),
        source,
        destination,
        length: packet.before_length,
        out: packet.out.map(|out| name(interfaces, out)),
        source_after,
        destination_after,
        tunnel_source,
        tunnel_destination,
        direction: &packet.direction,
        reason: &packet.reason,
        verdict: &packet.verdict,
    };
    let mut text = serde_json::to_string(&line).map_err(CommandError::runtime)?;
    text.push('\n');
    Ok(text)
}

/// `08:15:02.123 gw-in tcp 10.1.0.11:4000 -> 198.51.100.10:443, 60 bytes; as 203.0.113.10:31022 -> .. on gw-out;
/// worker 0: egress: forwarded`.
pub(super) fn text(packet: &CapturedPacket, interfaces: &[String]) -> String {
    let arrow = |it: PacketSummary| source_and_destination(&it).join(" -> ");
    let before = PacketSummary::of(&packet.before)
        .map_or_else(|| "not an IP packet".to_owned(), |it| format!("{} {}", protocol_name(it.protocol), arrow(it)));
    let out = packet.out.map(|out| format!(" on {}", name(interfaces, out))).unwrap_or_default();
    let (after, tunnel) = translated(packet);
    let after = after.map_or_else(String::new, |it| {
        let tunnel = tunnel.map(|it| format!(" in tunnel {}", arrow(it))).unwrap_or_default();
        format!("; as {}{tunnel}{out}", arrow(it))
    });
    let (seconds, ms) = (packet.time_ms / 1000 % 86_400, packet.time_ms % 1000);
    let time = format!("{:02}:{:02}:{:02}.{ms:03}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let interface = name(interfaces, packet.interface);
    sanitize(&format!("{time} {interface} {before}, {} bytes{after}; {}\n", packet.before_length, packet.verdict))
}

/// The forwarded packet, and its outer packet if it was encapsulated. Only encapsulation makes a packet longer, except
/// for the gateway's own replies, which are never UDP.
fn translated(packet: &CapturedPacket) -> (Option<PacketSummary>, Option<PacketSummary>) {
    let whole = PacketSummary::of(&packet.after);
    let longer = packet.after_length.saturating_sub(packet.before_length) as usize;
    let tunnel = whole.filter(|it| longer > 0 && it.protocol == protocol::UDP);
    let inside = tunnel.and_then(|_| PacketSummary::of(packet.after.get(longer..)?));
    (inside.or(whole), tunnel.filter(|_| inside.is_some()))
}

fn name(interfaces: &[String], number: u32) -> &str {
    interfaces.get(number as usize).map_or("?", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet() -> CapturedPacket {
        let frame = |source: [u8; 4], port: [u8; 2]| {
            let mut frame = vec![0; 12];
            frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
            frame.extend(source);
            frame.extend([198, 51, 100, 10]);
            frame.extend(port);
            frame.extend([0, 53, 0, 8, 0, 0]);
            frame
        };
        CapturedPacket {
            time_ms: 3_723_004,
            before: frame([10, 1, 0, 11], [0x0f, 0xa0]),
            before_length: 42,
            after: frame([203, 0, 113, 10], [0x50, 0]),
            after_length: 42,
            out: Some(1),
            verdict: "worker 0: egress: forwarded".to_owned(),
            direction: "egress".to_owned(),
            ..CapturedPacket::default()
        }
    }

    #[test]
    fn an_encapsulated_packet_shows_inner_and_outer_addresses() {
        let names = ["in".to_owned(), "out".to_owned()];
        let mut encapsulated = packet();
        let mut outer = encapsulated.before.clone();
        // The VXLAN header follows the UDP header.
        outer.extend([0; 8]);
        encapsulated.after = [outer, encapsulated.after].concat();
        encapsulated.after_length += 50;
        let text = text(&encapsulated, &names);
        let after = "as 203.0.113.10:20480 -> 198.51.100.10:53 in tunnel 10.1.0.11:4000 -> 198.51.100.10:53 on out;";
        assert!(text.contains(after), "{text}");
        let parsed: serde_json::Value = serde_json::from_str(&json(&encapsulated, &names).unwrap()).unwrap();
        assert_eq!(
            (&parsed["source_after"], &parsed["tunnel_source"]),
            (&"203.0.113.10:20480".into(), &"10.1.0.11:4000".into())
        );
        // Truncated before the inner packet: only the outer addresses are known.
        encapsulated.after.truncate(60);
        assert_eq!(translated(&encapsulated), (PacketSummary::of(&encapsulated.before), None));
    }

    #[test]
    fn a_line_has_addresses_before_and_after_and_the_verdict() {
        let names = ["in".to_owned(), "out".to_owned()];
        let expected = "01:02:03.004 in udp 10.1.0.11:4000 -> 198.51.100.10:53, 42 bytes; \
                        as 203.0.113.10:20480 -> 198.51.100.10:53 on out; worker 0: egress: forwarded\n";
        assert_eq!(text(&packet(), &names), expected);
        let parsed: serde_json::Value = serde_json::from_str(&json(&packet(), &names).unwrap()).unwrap();
        assert_eq!(parsed["source_after"], "203.0.113.10:20480");
        assert!(parsed.get("reason").is_none());
        let bare = CapturedPacket { verdict: "worker 1: dropped".to_owned(), ..CapturedPacket::default() };
        assert_eq!(text(&bare, &[]), "00:00:00.000 ? not an IP packet, 0 bytes; worker 1: dropped\n");
    }
}
