//! Fuzzing of capture and session filters, as text and as protobuf messages.

use prost::Message;
use vipgate_dataplane::session::query::SessionFilter;

use super::network;
use crate::admin::capture_filter::{compile, parse};
use crate::admin::proto;

/// Parses the input as filter text, and decodes it as filter messages.
pub fn filter(data: &[u8]) {
    let network = network();
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(filter) = parse(text)
    {
        let printed = to_text(&filter);
        assert_eq!(parse(&printed).as_ref(), Ok(&filter), "{text:?} is printed as {printed:?}");
        let (first, second) = (compile(&filter, &network), compile(&filter, &network));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        // Every valid filter compiles, unless it names an interface, which may not exist.
        assert!(first.is_ok() || !filter.interface.is_empty(), "{text:?}: {first:?}");
    }
    if let Ok(filter) = proto::CaptureFilter::decode(data)
        && let Ok(compiled) = compile(&filter, &network)
    {
        assert_eq!(compiled.nets.len(), filter.nets.len());
        // Printed and parsed, it compiles to the same filter.
        let again = parse(&to_text(&filter)).map(|again| compile(&again, &network));
        assert_eq!(format!("{again:?}"), format!("Ok(Ok({compiled:?}))"), "{filter:?}");
    }
    if let Ok(message) = proto::SessionFilter::decode(data)
        && let Ok(filter) = SessionFilter::try_from(&message)
    {
        let text = |address: Option<std::net::IpAddr>| address.map(|it| it.to_string()).unwrap_or_default();
        let again = proto::SessionFilter {
            endpoint: text(filter.endpoint),
            vip: text(filter.vip),
            remote: text(filter.remote),
            protocol: filter.protocol.map(|number| number.to_string()).unwrap_or_default(),
            state: filter.state.map(|state| state.name().to_owned()).unwrap_or_default(),
        };
        assert_eq!(SessionFilter::try_from(&again), Ok(filter));
    }
}

/// The text form of a filter.
fn to_text(filter: &proto::CaptureFilter) -> String {
    let proto::CaptureFilter { nets, port, protocol, interface, outcome } = filter;
    let mut words: Vec<String> =
        nets.iter().map(|net| if net.contains('/') { format!("net {net}") } else { format!("host {net}") }).collect();
    words.extend((*port > 0).then(|| format!("port {port}")));
    words.extend((!protocol.is_empty()).then(|| format!("proto {protocol}")));
    words.extend((!interface.is_empty()).then(|| format!("in {interface}")));
    words.extend((!outcome.is_empty()).then(|| outcome.clone()));
    words.join(" and ")
}
