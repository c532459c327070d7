-- int_benchmark_problems: the problems each benchmark is made of.
-- Grain: one row per problem_id.
--   as in int_benchmark_candidates
with final as (
    select int_benchmark_candidates.*
    from int_benchmark_candidates
    cross join settings
    where int_benchmark_candidates.position <= settings.benchmark_size
)

select * from final
