//! nftables: the contents of the table `inet vipgate`, and the script that takes the kernel from one to another.

pub mod script;
pub mod table;
