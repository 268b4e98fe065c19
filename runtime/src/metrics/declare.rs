//! The declaration of metrics: each has its field, type, name and help in one line.

/// Declares a struct of metrics, and how it is registered. A metric's help is also the documentation of its field.
///
/// A metric begins with its default value, or with the one after `=`. `in` names a unit, which becomes a suffix of the
/// name.
///
/// ```text
/// tutti_runtime::declare_metrics! {
///     /// Metrics of a kitchen.
///     #[derive(Clone, Debug)]
///     struct KitchenMetrics {
///         meals: Counter, "meals", "Meals cooked";
///         cooking: Histogram = Histogram::new([60.0]), "cooking_seconds", "Seconds per meal";
///     }
/// }
/// ```
#[macro_export]
macro_rules! declare_metrics {
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
    (@register $registry:ident, $name:literal, $help:literal, $metric:expr) => {
        $registry.register($name, $help, $metric)
    };
    (@register $registry:ident, $name:literal, $help:literal, $metric:expr, $unit:expr) => {
        $registry.register_with_unit($name, $help, $unit, $metric)
    };
    (
        $( #[$attribute:meta] )*
        $vis:vis struct $group:ident {
            $( $field:ident: $type:ty $( = $new:expr )?, $name:literal $( in $unit:path )?, $help:literal; )+
        }
    ) => {
        $( #[$attribute] )*
        $vis struct $group {
            $( #[doc = $help] $field: $type, )+
        }

        impl $group {
            /// Creates the metrics and registers them.
            $vis fn register(registry: &mut $crate::metrics::Registry) -> Self {
                let own = Self { $( $field: $crate::declare_metrics!(@new $( $new )?), )+ };
                $( $crate::declare_metrics!(
                    @register registry, $name, $help, own.$field.clone() $(, $unit )?
                ); )+
                own
            }
        }
    };
}
