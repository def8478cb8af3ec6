//! Capture filters: as people write them, and as messages.

use prost::Message;
use vipgate_dataplane::command::SessionFilter;

use super::network;
use crate::admin::capture_filter::{compile, parse};
use crate::admin::proto;

/// Any text as a filter, and the same bytes as messages.
pub fn filter(data: &[u8]) {
    let network = network();
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(filter) = parse(text)
    {
        let words = words(&filter);
        assert_eq!(parse(&words).as_ref(), Ok(&filter), "{text:?} comes back as {words:?}");
        let (one, other) = (compile(&filter, &network), compile(&filter, &network));
        assert_eq!(format!("{one:?}"), format!("{other:?}"));
        // What people may write, workers can have; only interfaces are this gateway's own.
        assert!(one.is_ok() || !filter.interface.is_empty(), "{text:?}: {one:?}");
    }
    if let Ok(filter) = proto::CaptureFilter::decode(data)
        && let Ok(compiled) = compile(&filter, &network)
    {
        assert_eq!(compiled.nets.len(), filter.nets.len());
        // As people would have written it, it means the same.
        let again = parse(&words(&filter)).map(|again| compile(&again, &network));
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

/// A filter as people would write it.
fn words(filter: &proto::CaptureFilter) -> String {
    let proto::CaptureFilter { nets, port, protocol, interface, outcome } = filter;
    let mut words: Vec<String> =
        nets.iter().map(|net| if net.contains('/') { format!("net {net}") } else { format!("host {net}") }).collect();
    words.extend((*port > 0).then(|| format!("port {port}")));
    words.extend((!protocol.is_empty()).then(|| format!("proto {protocol}")));
    words.extend((!interface.is_empty()).then(|| format!("in {interface}")));
    words.extend((!outcome.is_empty()).then(|| outcome.clone()));
    words.join(" and ")
}
